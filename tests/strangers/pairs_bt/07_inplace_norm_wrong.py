WHAT = "On the path without autograd the normalisation centres its argument in place (line 14), which is the residual stream itself, so under no_grad the residual branch carries the normalised stream (and the caller's x is overwritten)."
"""Pre-norm block; without autograd the normalisation is one fused pass that makes a single temporary."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


def layer_norm(x, gain, bias, eps=1e-5):
    if torch.is_grad_enabled():
        return F.layer_norm(x, gain.shape, gain, bias, eps)
    var, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
    y = x.sub_(mean)
    return y.mul_(torch.rsqrt(var + eps)).mul_(gain).add_(bias)


class Block(nn.Module):
    def __init__(self, width, heads, hidden):
        super().__init__()
        self.heads = heads
        self.g1, self.b1 = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.g2, self.b2 = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def attention(self, x, mask):
        B, T, D = x.shape
        q, k, v = (y.view(B, T, self.heads, -1).transpose(1, 2) for y in self.qkv(x).chunk(3, dim=-1))
        allowed = None if mask is None else mask[:, None, None, :]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        return self.proj(y.transpose(1, 2).reshape(B, T, D))

    def forward(self, x, mask=None):
        x = x + self.attention(layer_norm(x, self.g1, self.b1), mask)
        h = layer_norm(x, self.g2, self.b2)
        return x + self.down(F.gelu(self.up(h)))


subject = Subject(
    kind="layer",
    name="block with a fused norm",
    build=lambda c: Block(c.d_model, c.num_heads, c.d_ff),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    declares={"norm": "layer", "norm_placement": "pre", "activation": "gelu", "residual": True, "bias": True},
)

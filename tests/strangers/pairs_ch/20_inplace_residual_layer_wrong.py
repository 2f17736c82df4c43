"""Pre-norm layer with a lean inference path: without autograd, residual sums reuse a buffer."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


def join(stream, update):
    """stream + update"""
    if torch.is_grad_enabled():
        return stream + update
    return stream.add_(update)


class LeanLayer(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.heads = heads
        self.norm_attn, self.norm_mlp = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.in_proj, self.out_proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.fc1, self.fc2 = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def attend(self, x, mask):
        b, t, d = x.shape
        q, k, v = self.in_proj(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        bias = None
        if mask is not None:
            bias = torch.zeros(b, 1, 1, t, dtype=x.dtype, device=x.device)
            bias = bias.masked_fill(~mask[:, None, None], torch.finfo(x.dtype).min)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return self.out_proj(y.transpose(1, 2).reshape(b, t, d))

    def forward(self, x, mask=None):
        x = join(x, self.attend(self.norm_attn(x), mask))
        return join(x, self.fc2(F.gelu(self.fc1(self.norm_mlp(x)))))


subject = Subject(
    kind="layer",
    name="lean layer",
    build=lambda c: LeanLayer(c.d_model, c.num_heads, c.d_ff),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    declares={"causal": False, "positions": "none", "norm": "layer", "norm_placement": "pre", "activation": "gelu",
              "residual": True, "stacked": False},
)

WHAT = 'Without autograd the first residual sum is written into the tensor of the caller: the input of the layer is changed behind the back of whoever still uses it (line 13).'

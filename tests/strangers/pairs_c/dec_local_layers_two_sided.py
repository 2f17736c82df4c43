
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

class Attention(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h, self.qkv, self.proj = h, nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)

    def forward(self, x, ok):
        B, T, D = x.shape
        q, k, v = self.qkv(x).reshape(B, T, 3, self.h, D // self.h).permute(2, 0, 3, 1, 4)
        ok = ok | ~ok.any(-1, keepdim=True)  # a row without keys takes the mean: finite
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=ok)
        return self.proj(y.transpose(1, 2).reshape(B, T, D))


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.attn_norm, self.mlp_norm = nn.RMSNorm(c.d_model, eps=1e-6), nn.RMSNorm(c.d_model, eps=1e-6)
        self.attn = Attention(c.d_model, c.num_heads)
        self.w1, self.w3 = (nn.Linear(c.d_model, c.d_ff, bias=False) for _ in range(2))
        self.w2 = nn.Linear(c.d_ff, c.d_model, bias=False)

    def forward(self, x, ok):
        x = x + self.attn(self.attn_norm(x), ok)
        y = self.mlp_norm(x)
        return x + self.w2(F.silu(self.w1(y)) * self.w3(y))


class Net(nn.Module):
    """Layers 0, 2, ... see three tokens, the others the whole past (as in Gemma 2)."""
    def __init__(self, c, bug):
        super().__init__()
        self.bug = bug
        self.embed = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList(Block(c) for _ in range(c.num_layers))
        self.norm, self.head = nn.RMSNorm(c.d_model, eps=1e-6), nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, tokens, mask=None):
        i = torch.arange(tokens.shape[1], device=tokens.device)
        gap = i[:, None] - i
        real = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
        past = (gap >= 0) & real[:, None, None, :]
        near = (gap.abs() < 3) & (past if not self.bug else real[:, None, None, :])
        x = self.embed(tokens)
        for n, layer in enumerate(self.layers):
            x = layer(x, past if n % 2 else near)
        return self.head(self.norm(x))


WHAT = 'The mask of the local layers is the band |i - j| < 3 without the causal half, so these layers see two future tokens.'
PLACE = 'mask of the local (sliding-window) layers'


def make(bug):
    return Subject(
        kind="decoder",
        build=lambda c: Net(c, bug),
        forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    )


right, wrong = make(False), make(True)

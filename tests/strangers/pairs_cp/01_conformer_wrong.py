"""Conformer encoder for speech units (Gulati et al. 2020), LayerNorm in the place of BatchNorm."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class HalfStep(nn.Module):
    def __init__(self, d, d_ff):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, d_ff), nn.Linear(d_ff, d)

    def forward(self, x):
        return 0.5 * self.down(F.silu(self.up(self.norm(x))))


class SelfAttention(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x, keep):
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = keep[:, None, None, :]
        scores = (q @ k.mT) * k.shape[-1] ** -0.5
        scores = scores.masked_fill(~seen, torch.finfo(x.dtype).min)
        return self.out((scores.softmax(-1) * seen @ v).transpose(1, 2).reshape(b, t, d))


class Convolution(nn.Module):
    """Pointwise, GLU, depthwise, norm, swish, pointwise."""

    def __init__(self, d, width=5):
        super().__init__()
        self.norm, self.mid = nn.LayerNorm(d), nn.LayerNorm(d)
        self.expand = nn.Conv1d(d, 2 * d, 1)
        self.depthwise = nn.Conv1d(d, d, width, padding=width // 2, groups=d)
        self.project = nn.Conv1d(d, d, 1)

    def forward(self, x, keep):
        y = self.norm(x).mT
        y = y.masked_fill(~keep[:, None, :], 0.0)
        y = F.glu(self.expand(y), dim=1)
        y = self.mid(self.depthwise(y).mT).mT
        return self.project(F.silu(y)).mT


class Block(nn.Module):
    def __init__(self, d, heads, d_ff):
        super().__init__()
        self.first, self.second = HalfStep(d, d_ff), HalfStep(d, d_ff)
        self.attention, self.convolution = SelfAttention(d, heads), Convolution(d)
        self.norm = nn.LayerNorm(d)

    def forward(self, x, keep):
        x = x + self.first(x)
        x = x + self.attention(x, keep)
        x = x + self.convolution(x, keep)
        return self.norm(x + self.second(x))


class Conformer(nn.Module):
    def __init__(self, vocab, d, heads, layers, d_ff):
        super().__init__()
        self.units = nn.Embedding(vocab, d)
        self.blocks = nn.ModuleList([Block(d, heads, d_ff) for _ in range(layers)])

    def forward(self, tokens, attention_mask=None):
        keep = torch.ones_like(tokens, dtype=torch.bool) if attention_mask is None else attention_mask
        x = self.units(tokens)
        for block in self.blocks:
            x = block(x, keep)
        return x


subject = Subject(
    kind="encoder",
    build=lambda c: Conformer(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={"causal": False, "positions": "other", "norm": "layer", "residual": True},
)

WHAT = "Line 46: padded frames are zeroed before the pointwise convolution, whose bias fills them again, so that the depthwise convolution carries padding into real frames. Zero after the GLU."

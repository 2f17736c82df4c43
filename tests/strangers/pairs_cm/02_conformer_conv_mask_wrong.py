"""Conformer-like layer for padded speech batches: attention, then the convolution module."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class ConvModule(nn.Module):
    def __init__(self, dim, kernel=5):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.expand = nn.Conv1d(dim, 2 * dim, 1)
        self.depthwise = nn.Conv1d(dim, dim, kernel, padding=kernel // 2, groups=dim)
        self.post = nn.LayerNorm(dim)
        self.project = nn.Conv1d(dim, dim, 1)

    def forward(self, x, frames=None):
        y = self.norm(x).transpose(1, 2)
        if frames is not None:  # padded frames are silence for the convolution
            y = y.masked_fill(~frames[:, None, :], 0.0)
        y = F.glu(self.expand(y), dim=1)
        y = self.depthwise(y)
        y = F.silu(self.post(y.transpose(1, 2))).transpose(1, 2)
        return self.project(y).transpose(1, 2)


class SelfAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.h = heads
        self.norm = nn.LayerNorm(dim)
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x, frames=None):
        x = self.norm(x)
        q, k, v = (f(x).unflatten(-1, (self.h, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        s = q @ k.mT / q.shape[-1] ** 0.5
        if frames is None:
            w = s.softmax(-1)
        else:
            off = ~frames[:, None, None, :]
            w = s.masked_fill(off, torch.finfo(s.dtype).min).softmax(-1).masked_fill(off, 0.0)
        return self.o((w @ v).transpose(1, 2).flatten(2))


class ConformerLite(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.attention = SelfAttention(dim, heads)
        self.conv = ConvModule(dim)

    def forward(self, x, frames=None):
        x = x + self.attention(x, frames)
        return x + self.conv(x, frames)


subject = Subject(
    kind="layer",
    build=lambda c: ConformerLite(c.d_model, c.num_heads),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    declares={"causal": False, "positions": "other"},
)

WHAT = 'Padded frames are zeroed before the pointwise convolution and its GLU, whose biases make them nonzero again: the depthwise convolution sees glu(bias) behind the last real frame where an unpadded utterance has zeros (line 21).'

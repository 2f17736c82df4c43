"""A Conformer block (macaron), with a LayerNorm in the convolution module instead of BatchNorm."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class HalfStep(nn.Sequential):
    def __init__(self, dim, hidden):
        super().__init__(nn.LayerNorm(dim), nn.Linear(dim, hidden), nn.SiLU(), nn.Linear(hidden, dim))


class SelfAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x, mask):
        x = self.norm(x)
        B, T, D = x.shape
        q, k, v = (f(x).view(B, T, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        scores = q @ k.transpose(-1, -2) / (q.shape[-1] ** 0.5)
        scores = scores.masked_fill(~mask[:, None, None], torch.finfo(scores.dtype).min)
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, D))


class ConvModule(nn.Module):
    def __init__(self, dim, kernel=5):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.pointwise_in = nn.Linear(dim, 2 * dim)
        self.depthwise = nn.Conv1d(dim, dim, kernel, padding=kernel // 2, groups=dim)
        self.norm_conv = nn.LayerNorm(dim)
        self.pointwise_out = nn.Linear(dim, dim)

    def forward(self, x, mask):
        x = self.norm(x)
        x = F.glu(self.pointwise_in(x), dim=-1)
        x = x.masked_fill(~mask[..., None], 0.0)
        x = self.depthwise(x.transpose(1, 2)).transpose(1, 2)
        return self.pointwise_out(F.silu(self.norm_conv(x)))


class ConformerBlock(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.ff1, self.ff2 = HalfStep(dim, hidden), HalfStep(dim, hidden)
        self.attention = SelfAttention(dim, heads)
        self.conv = ConvModule(dim)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x, mask=None):
        if mask is None:
            mask = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        x = x + 0.5 * self.ff1(x)
        x = x + self.attention(x, mask)
        x = x + self.conv(x, mask)
        x = x + 0.5 * self.ff2(x)
        return self.norm(x)


subject = Subject(
    kind="layer",
    name="conformer block",
    build=lambda c: ConformerBlock(c.d_model, c.num_heads, c.d_ff),
    forward=lambda model, x, attention_mask=None: model(x, attention_mask),
    declares={"causal": False, "positions": "other", "padding_side": "both"},
)

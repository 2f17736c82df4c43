"""A Conformer encoder (Gulati et al. 2020) over discrete audio units; convolutions give the order, no other positions."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class ConvModule(nn.Module):
    def __init__(self, width, kernel=3):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.expand = nn.Conv1d(width, 2 * width, 1)
        self.depthwise = nn.Conv1d(width, width, kernel, padding=kernel // 2, groups=width)
        self.inner_norm = nn.LayerNorm(width)
        self.project = nn.Conv1d(width, width, 1)

    def forward(self, x, pad):
        h = self.norm(x).transpose(1, 2)
        h = F.glu(self.expand(h), dim=1)
        if pad is not None:
            h = h.masked_fill(pad[:, None, :], 0.0)  # what the depthwise convolution pads with
        h = self.inner_norm(self.depthwise(h).transpose(1, 2))
        return self.project(F.silu(h).transpose(1, 2)).transpose(1, 2)


class SelfAttention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x, pad):
        B, T, D = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        score = q @ k.mT * q.shape[-1] ** -0.5
        if pad is not None:
            hidden = pad[:, None, None, :]
            prob = score.masked_fill(hidden, torch.finfo(score.dtype).min).softmax(-1).masked_fill(hidden, 0.0)
        else:
            prob = score.softmax(-1)
        return self.out((prob @ v).transpose(1, 2).reshape(B, T, D))


def feed_forward(width, inner):
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, inner), nn.SiLU(), nn.Linear(inner, width))


class ConformerBlock(nn.Module):
    def __init__(self, width, heads, inner):
        super().__init__()
        self.ff1, self.ff2 = feed_forward(width, inner), feed_forward(width, inner)
        self.attention, self.conv = SelfAttention(width, heads), ConvModule(width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x, pad):
        x = x + 0.5 * self.ff1(x)
        x = x + self.attention(x, pad)
        x = x + self.conv(x, pad)
        x = x + 0.5 * self.ff2(x)
        return self.norm(x)


class Conformer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.units = nn.Embedding(c.vocab_size, c.d_model)
        self.blocks = nn.ModuleList(ConformerBlock(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers))
        self.ctc = nn.Linear(c.d_model, c.vocab_size)

    def forward(self, tokens, attention_mask=None):
        pad = None if attention_mask is None else ~attention_mask.bool()
        x = self.units(tokens)
        for block in self.blocks:
            x = block(x, pad)
        return self.ctc(x)


subject = Subject(
    kind="encoder",
    build=Conformer,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={"causal": False, "positions": "other", "padding_side": "both", "structure": "other"},
)

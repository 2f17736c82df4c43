WHAT = "padding is zeroed behind the depthwise convolution, not before it: the kernel carries the content of the padding into the last real frames: line 44"
"""Conformer blocks over discrete units: half feed-forward, attention, convolution, half feed-forward."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class FeedForwardModule(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x):
        return self.down(F.silu(self.up(self.norm(x))))


class AttentionModule(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x, pad):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT / q.shape[-1] ** 0.5
        if pad is not None:
            scores = scores.masked_fill(pad[:, None, None, :], torch.finfo(scores.dtype).min)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class ConvolutionModule(nn.Module):
    def __init__(self, dim, kernel=3):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.pointwise_in = nn.Linear(dim, 2 * dim)
        self.depthwise = nn.Conv1d(dim, dim, kernel, padding=kernel // 2, groups=dim)
        self.inner_norm = nn.LayerNorm(dim)
        self.pointwise_out = nn.Linear(dim, dim)

    def forward(self, x, pad):
        x = F.glu(self.pointwise_in(self.norm(x)), dim=-1)
        x = self.depthwise(x.transpose(1, 2)).transpose(1, 2)
        if pad is not None:
            x = x.masked_fill(pad[..., None], 0.0)
        return self.pointwise_out(F.silu(self.inner_norm(x)))


class ConformerBlock(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.ff1, self.ff2 = FeedForwardModule(dim, hidden), FeedForwardModule(dim, hidden)
        self.attention, self.convolution = AttentionModule(dim, heads), ConvolutionModule(dim)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x, pad):
        x = x + 0.5 * self.ff1(x)
        x = x + self.attention(x, pad)
        x = x + self.convolution(x, pad)
        return self.norm(x + 0.5 * self.ff2(x))


class Conformer(nn.Module):
    def __init__(self, units, dim, heads, layers, hidden):
        super().__init__()
        self.embed = nn.Embedding(units, dim)
        self.blocks = nn.ModuleList(ConformerBlock(dim, heads, hidden) for _ in range(layers))
        self.ctc = nn.Linear(dim, units)

    def forward(self, units, attention_mask=None):
        pad = None if attention_mask is None else ~attention_mask.bool()
        x = self.embed(units)
        for block in self.blocks:
            x = block(x, pad)
        return self.ctc(x)


subject = Subject(
    kind="encoder",
    name="Conformer",
    build=lambda c: Conformer(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "causal": False,
        "positions": "other",
        "norm": "layer",
        "norm_placement": "other",
        "activation": "other",
        "structure": "other",
        "padding_side": "both",
    },
)

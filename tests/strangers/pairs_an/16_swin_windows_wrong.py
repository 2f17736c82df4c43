WHAT = 'the tokens that fill up the last window count as valid, so the real ones of that window attend to filler (the bias of qkv) whenever T is no multiple of the window (line 48: valid = F.pad(valid, (0, extra), value=True))'
"""Swin in one dimension, an encoder of token sequences: windows of four, every second layer shifted by two."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

M = 4  # tokens of a window


def window_partition(x):
    """[B, N, ...] -> [B * N / M, M, ...]"""
    return x.reshape(-1, M, *x.shape[2:])


class WindowAttention(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.relative_position_bias_table = nn.Parameter(torch.randn(2 * M - 1, num_heads) * 0.5)
        coords = torch.arange(M)
        self.register_buffer("relative_position_index", coords[:, None] - coords[None, :] + M - 1, persistent=False)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x, allowed):
        W, m, C = x.shape
        q, k, v = self.qkv(x).reshape(W, m, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        attn = q @ k.transpose(-2, -1) * (C // self.num_heads) ** -0.5
        bias = self.relative_position_bias_table[self.relative_position_index].permute(2, 0, 1)
        attn = (attn + bias).masked_fill(~allowed[:, None], torch.finfo(x.dtype).min)
        return self.proj((attn.softmax(-1) @ v).transpose(1, 2).reshape(W, m, C))


class SwinBlock(nn.Module):
    def __init__(self, dim, num_heads, hidden, shift):
        super().__init__()
        self.shift = shift
        self.norm1, self.attn = nn.LayerNorm(dim), WindowAttention(dim, num_heads)
        self.norm2, self.mlp = nn.LayerNorm(dim), nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))

    def forward(self, x, valid):
        B, T, C = x.shape
        h = self.norm1(x)
        # up to a whole number of windows
        extra = -T % M
        h = F.pad(h, (0, 0, 0, extra))
        valid = F.pad(valid, (0, extra), value=True)
        region = torch.arange(T + extra, device=x.device) < self.shift  # what a shift brings round to the end
        region = region.expand(B, -1)
        if self.shift:
            h, valid, region = (t.roll(-self.shift, dims=1) for t in (h, valid, region))
        h, valid, region = window_partition(h), window_partition(valid), window_partition(region)
        allowed = (region[:, :, None] == region[:, None, :]) & valid[:, None, :]
        h = self.attn(h, allowed).reshape(B, T + extra, C)
        if self.shift:
            h = h.roll(self.shift, dims=1)
        x = x + h[:, :T]
        return x + self.mlp(self.norm2(x))


class Swin1d(nn.Module):
    def __init__(self, vocab, dim, heads, depth, hidden):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList([SwinBlock(dim, heads, hidden, M // 2 * (i % 2)) for i in range(depth)])
        self.norm = nn.LayerNorm(dim)

    def forward(self, tokens, attention_mask=None):
        valid = torch.ones_like(tokens, dtype=torch.bool) if attention_mask is None else attention_mask
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, valid)
        return self.norm(x)


subject = Subject(
    kind="encoder",
    name="Swin in one dimension",
    build=lambda c: Swin1d(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "causal": False, "sparse": True, "positions": "other", "norm": "layer", "norm_placement": "pre",
        "final_norm": True, "activation": "gelu", "bias": True, "structure": "other", "padding_side": "right",
    },
)

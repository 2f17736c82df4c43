"""Swin along one axis (audio, say): windows, and windows shifted by half of one, with the cyclic roll of the paper."""

import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject

WINDOW = 4


def window_partition(x):
    """[B, L, ...] -> [B, L / w, w, ...]"""
    return x.unflatten(1, (-1, WINDOW))


class WindowAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.relative_position_bias_table = nn.Parameter(0.5 * torch.randn(2 * WINDOW - 1, heads))
        place = torch.arange(WINDOW)
        self.register_buffer("index", place[:, None] - place[None, :] + WINDOW - 1, persistent=False)

    def forward(self, x, allowed):
        """x [B, N, w, C], allowed [B, N, w, w]."""
        b, n, w, c = x.shape
        q, k, v = self.qkv(x).view(b, n, w, 3, self.heads, c // self.heads).permute(3, 0, 1, 4, 2, 5)
        scores = q @ k.transpose(-2, -1) * (c // self.heads) ** -0.5
        scores = scores + self.relative_position_bias_table[self.index].permute(2, 0, 1)
        scores = scores.masked_fill(~allowed[:, :, None], torch.finfo(scores.dtype).min)
        return self.proj((scores.softmax(-1) @ v).transpose(2, 3).reshape(b, n, w, c))


class SwinBlock(nn.Module):
    def __init__(self, dim, heads, hidden, shift, roll_mask):
        super().__init__()
        self.shift, self.roll_mask = shift, roll_mask
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = WindowAttention(dim, heads)
        self.mlp = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))

    def forward(self, x, mask):
        length = x.shape[1]
        fill = -length % WINDOW
        h, real = F.pad(self.norm1(x), (0, 0, 0, fill)), F.pad(mask, (0, fill))
        region = torch.arange(length + fill, device=x.device)[None]
        if self.shift:
            h = h.roll(-self.shift, 1)
            region = region.roll(-self.shift, 1)
            if self.roll_mask:
                real = real.roll(-self.shift, 1)
        h, real, region = window_partition(h), window_partition(real), window_partition(region)
        own = torch.eye(WINDOW, dtype=torch.bool, device=x.device)
        front = region < self.shift  # was rolled to the end: what the roll brought together stays apart
        near = front[..., :, None] == front[..., None, :]
        h = self.attn(h, (real[..., None, :] & near) | own).flatten(1, 2)
        if self.shift:
            h = h.roll(self.shift, 1)
        x = x + h[:, :length]
        return x + self.mlp(self.norm2(x))


class Swin1d(nn.Module):
    def __init__(self, c, roll_mask):
        super().__init__()
        self.embed = nn.Embedding(c.vocab_size, c.d_model)
        self.blocks = nn.ModuleList(
            [
                SwinBlock(c.d_model, c.num_heads, c.d_ff, shift, roll_mask)
                for _ in range(c.num_layers)
                for shift in (0, WINDOW // 2)
            ]
        )
        self.norm = nn.LayerNorm(c.d_model)

    def forward(self, tokens, attention_mask=None):
        mask = torch.ones_like(tokens, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return self.norm(x)


def subject(name, roll_mask):
    return Subject(
        kind="encoder",
        name=name,
        build=lambda c: Swin1d(c, roll_mask),
        forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
        declares={"causal": False, "sparse": True, "positions": "other", "padding_side": "right", "norm_placement": "pre",
                  "norm": "layer", "activation": "gelu", "structure": "other"},
    )


right = subject("swin 1d", True)
wrong = subject("swin 1d, mask at rest", False)

WHAT = "In shifted blocks the features are rolled by half a window, the padding mask is not."
CAUSE = (
    "SwinBlock with shift > 0 partitions an unrolled mask beside rolled features: the mask hides keys half a window further on "
    "than those that are padding, so padding is attended to and real keys are hidden at the seam."
)

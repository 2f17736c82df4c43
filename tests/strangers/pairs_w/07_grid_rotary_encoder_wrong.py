WHAT = "Tables are rebuilt for longer inputs alone, although the side of the grid depends on the length: behind a longer image a shorter one gets the coordinates of the longer grid (line 25)."

"""An encoder of image tokens in raster order: rotary positions in two dimensions, on the smallest square that holds them."""

import math

import torch
from torch import nn

from veriformer.properties import Subject


class GridRotary(nn.Module):
    """The first half of a head turns with the row, the second with the column. Tables are kept between calls."""

    def __init__(self, width, base=100.0):
        super().__init__()
        if width % 4:
            raise ValueError("two axes of pairs need heads of a multiple of four channels")
        self.quarter, self.base = width // 4, base
        self.built_for = 0
        self.cos = self.sin = None

    def tables(self, length, device):
        if length > self.built_for:
            side = math.isqrt(length - 1) + 1
            index = torch.arange(length)
            place = torch.stack([index // side, index % side], dim=-1).double()
            speed = self.base ** (-torch.arange(self.quarter).double() / self.quarter)
            angle = (place[..., None] * speed).flatten(1)
            self.cos, self.sin, self.built_for = angle.cos(), angle.sin(), length
        return self.cos[:length].to(device), self.sin[:length].to(device)

    def forward(self, x):
        cos, sin = (table.to(x.dtype) for table in self.tables(x.shape[2], x.device))
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)


class Attention(nn.Module):
    def __init__(self, width, heads, rotary):
        super().__init__()
        self.heads, self.rotary = heads, rotary
        self.to_qkv, self.to_out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = (z.unflatten(-1, (self.heads, -1)).transpose(1, 2) for z in self.to_qkv(x).chunk(3, dim=-1))
        q, k = self.rotary(q), self.rotary(k)
        weights = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).softmax(dim=-1)
        return self.to_out((weights @ v).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, width, heads, inner, rotary):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads, rotary)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GridEncoder(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.codes = nn.Embedding(c.vocab_size, c.d_model)
        rotary = GridRotary(c.d_model // c.num_heads)
        self.layers = nn.ModuleList([Layer(c.d_model, c.num_heads, c.d_ff, rotary) for _ in range(c.num_layers)])
        self.norm = nn.LayerNorm(c.d_model)

    def forward(self, codes):
        x = self.codes(codes)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


subject = Subject(
    kind="encoder",
    name="2-D rotary encoder",
    build=GridEncoder,
    forward=lambda model, tokens: model(tokens),
    declares={"causal": False, "positions": "other", "norm": "layer", "norm_placement": "pre", "final_norm": True, "activation": "gelu"},
)

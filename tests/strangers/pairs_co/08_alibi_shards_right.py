"""A decoder with ALiBi whose heads are split over ranks (here in one process): column-parallel qkv, row-parallel output."""
import math

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


def slopes(n):
    """As in the authors' code."""
    def power_of_two(n):
        start = 2.0 ** (-(2.0 ** -(math.log2(n) - 3)))
        return [start ** (i + 1) for i in range(n)]

    if math.log2(n).is_integer():
        return power_of_two(n)
    closest = 2 ** math.floor(math.log2(n))
    return power_of_two(closest) + slopes(2 * closest)[0::2][: n - closest]


class Shard(nn.Module):
    """What one rank holds: some heads, their rows of qkv and their columns of the output."""

    def __init__(self, width, d_head, heads, rank, world):
        super().__init__()
        self.local = heads // world
        self.qkv = nn.Linear(width, 3 * self.local * d_head, bias=False)
        self.out = nn.Linear(self.local * d_head, width, bias=False)
        mine = slopes(heads)[rank * self.local : (rank + 1) * self.local]
        self.register_buffer("slope", torch.tensor(mine, dtype=torch.float64).view(-1, 1, 1), persistent=False)

    def forward(self, x, seen):
        B, T, _ = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.local, -1).permute(2, 0, 3, 1, 4)
        place = torch.arange(T, device=x.device)
        bias = -self.slope.to(x.dtype) * (place[:, None] - place[None]).abs()
        score = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + bias
        score = score.masked_fill(~seen, torch.finfo(score.dtype).min)
        weight = score.softmax(-1) * seen  # a row that sees nothing gives 0
        return self.out((weight.to(v.dtype) @ v).transpose(1, 2).reshape(B, T, -1))


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        world = 2 if c.num_heads % 2 == 0 else 1
        d_head = c.d_model // c.num_heads
        self.ranks = nn.ModuleList(Shard(c.d_model, d_head, c.num_heads, rank, world) for rank in range(world))
        self.norm_1, self.norm_2 = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)
        self.up, self.down = nn.Linear(c.d_model, c.d_ff), nn.Linear(c.d_ff, c.d_model)

    def forward(self, x, seen):
        h = self.norm_1(x)
        x = x + sum(rank(h, seen) for rank in self.ranks)  # all-reduce
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class ShardedDecoder(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed = nn.Embedding(c.vocab_size, c.d_model)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.num_layers))
        self.norm, self.head = nn.LayerNorm(c.d_model), nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, tokens, attention_mask=None):
        T = tokens.shape[1]
        seen = torch.ones(T, T, dtype=torch.bool, device=tokens.device).tril()[None, None]
        if attention_mask is not None:
            seen = seen & attention_mask.bool()[:, None, None, :]
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, seen)
        return self.head(self.norm(x))


subject = Subject(
    kind="decoder",
    name="ALiBi over ranks",
    build=ShardedDecoder,
    forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask),
    declares={"positions": "alibi", "norm_placement": "pre", "norm": "layer", "activation": "gelu"},
)

"""Self-attention as two ranks compute it: each has half the heads, its rows of q, k and v, its columns of the output."""
import math

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class ParallelAttention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.world = heads, 2 if heads % 2 == 0 else 1
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        for linear in (self.q, self.k, self.v, self.o):
            nn.init.normal_(linear.bias, std=0.1)

    def column(self, linear, x, mine):
        return F.linear(x, linear.weight[mine], linear.bias[mine])

    def rank(self, rank, x, seen):
        width = x.shape[-1] // self.world
        mine = slice(rank * width, (rank + 1) * width)
        q, k, v = (
            self.column(linear, x, mine).unflatten(-1, (self.heads // self.world, -1)).transpose(1, 2)
            for linear in (self.q, self.k, self.v)
        )
        score = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        score = score.masked_fill(~seen, torch.finfo(score.dtype).min)
        mixed = ((score.softmax(-1) * seen).to(v.dtype) @ v).transpose(1, 2).flatten(2)
        bias = self.o.bias if rank == 0 else None
        return F.linear(mixed, self.o.weight[:, mine], bias)

    def forward(self, x, attention_mask=None):
        seen = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if attention_mask is None else attention_mask
        seen = seen[:, None, None, :]
        return sum(self.rank(rank, x, seen) for rank in range(self.world))  # all-reduce


def projections(model):
    views = {name: getattr(model, name).weight.data for name in "qkvo"}
    return views | {f"{name}_bias": getattr(model, name).bias.data for name in "qkvo"}


subject = Subject(
    kind="self_attention",
    name="attention of two ranks",
    build=lambda c: ParallelAttention(c.d_model, c.num_heads),
    forward=lambda model, x, attention_mask=None: model(x, attention_mask),
    projections=projections,
    declares={"causal": False, "bias": True},
)

"""LayerNorm over a hidden dimension that is split over tensor-parallel ranks (simulated: a list of shards, an all-reduce)."""
import torch
from torch import nn

from veriformer.properties import Subject

WORLD_SIZE = 2


def all_reduce_mean(values):
    return sum(values) / len(values)


class ShardedLayerNorm(nn.Module):
    def __init__(self, hidden_size, eps=1e-5):
        super().__init__()
        assert hidden_size % WORLD_SIZE == 0
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.bias = nn.Parameter(torch.zeros(hidden_size))
        self.eps = eps

    def forward(self, hidden):
        shards = hidden.chunk(WORLD_SIZE, dim=-1)
        # one moment a rank, then two small all-reduces instead of gathering the hidden states
        local_mean = [s.mean(-1, keepdim=True) for s in shards]
        local_var = [s.var(-1, unbiased=False, keepdim=True) for s in shards]
        mean = all_reduce_mean(local_mean)
        var = all_reduce_mean([v + (m - mean) ** 2 for v, m in zip(local_var, local_mean)])
        inv = torch.rsqrt(var + self.eps)
        weights, biases = self.weight.chunk(WORLD_SIZE), self.bias.chunk(WORLD_SIZE)
        return torch.cat([(s - mean) * inv * w + b for s, w, b in zip(shards, weights, biases)], dim=-1)


subject = Subject(
    kind="norm",
    name="tensor-parallel LayerNorm",
    build=lambda c: ShardedLayerNorm(c.d_model),
    forward=lambda m, x: m(x),
    domain={"d_model": [8, 12, 16]},
    declares={"norm": "layer"},
)

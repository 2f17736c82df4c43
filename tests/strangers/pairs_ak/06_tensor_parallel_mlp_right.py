"""Tensor-parallel MLP (Megatron): the first map is cut by its outputs, the second by its inputs; ranks are simulated."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


def all_reduce(parts):
    return torch.stack(parts).sum(0)


class ColumnParallelLinear(nn.Module):
    def __init__(self, in_features, sizes):
        super().__init__()
        self.shards = nn.ModuleList(nn.Linear(in_features, size) for size in sizes)

    def forward(self, x):
        return [shard(x) for shard in self.shards]


class RowParallelLinear(nn.Module):
    def __init__(self, sizes, out_features):
        super().__init__()
        total = sum(sizes)
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(out_features, size) / total**0.5) for size in sizes)
        self.bias = nn.Parameter(torch.zeros(out_features))

    def forward(self, parts):
        return all_reduce([F.linear(part, weight) for part, weight in zip(parts, self.weights)]) + self.bias


class ParallelMLP(nn.Module):
    def __init__(self, d_model, d_ff, world_size=2):
        super().__init__()
        sizes = [len(chunk) for chunk in torch.arange(d_ff).tensor_split(world_size)]
        self.dense_h_to_4h = ColumnParallelLinear(d_model, sizes)
        self.dense_4h_to_h = RowParallelLinear(sizes, d_model)

    def forward(self, x):
        return self.dense_4h_to_h([F.gelu(part) for part in self.dense_h_to_4h(x)])


subject = Subject(
    kind="feed_forward",
    name="tensor-parallel mlp",
    build=lambda c: ParallelMLP(c.d_model, c.d_ff),
    forward=lambda m, x: m(x),
    declares={"activation": "gelu", "bias": True},
)

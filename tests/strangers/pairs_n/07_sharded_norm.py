"""LayerNorm of hidden states that are sharded over two ranks along the channels: every rank reduces its own channels, and
only three numbers a token go over the wire (count, mean, sum of squares about the mean). Here both ranks are local."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from veriformer.properties import Subject

WHAT = "Merging the two shards' statistics adds their sums of squares but leaves out how far the shards' means lie apart."
CAUSE = (
    "The variance over all channels is the within-shard part plus count * (shard mean - common mean)^2; the merge "
    "(Chan's formula) lacks the second term, so the variance is too small whenever the two halves of the channels "
    "have different means, and the output too large."
)

WORLD = 2


class Moments(NamedTuple):
    count: int
    mean: Tensor
    squares: Tensor


def local_moments(shard: Tensor) -> Moments:
    mean = shard.mean(-1, keepdim=True)
    return Moments(shard.shape[-1], mean, (shard - mean).square().sum(-1, keepdim=True))


def all_reduce(parts: list[Moments]) -> Moments:
    count = sum(part.count for part in parts)
    mean = sum(part.count * part.mean for part in parts) / count
    squares = sum(part.squares + part.count * (part.mean - mean).square() for part in parts)
    return Moments(count, mean, squares)


def all_reduce_sums(parts: list[Moments]) -> Moments:
    count = sum(part.count for part in parts)
    mean = sum(part.count * part.mean for part in parts) / count
    squares = sum(part.squares for part in parts)
    return Moments(count, mean, squares)


class ShardedLayerNorm(nn.Module):
    reduce = staticmethod(all_reduce)

    def __init__(self, width: int, eps: float = 1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        work = x.to(torch.promote_types(x.dtype, torch.float32))
        shards = work.chunk(WORLD, dim=-1)
        moments = self.reduce([local_moments(shard) for shard in shards])
        scale = torch.rsqrt(moments.squares / moments.count + self.eps)
        normed = torch.cat([(shard - moments.mean) * scale for shard in shards], dim=-1)
        return (normed * self.weight + self.bias).to(x.dtype)


class ShardedLayerNormV2(ShardedLayerNorm):
    reduce = staticmethod(all_reduce_sums)


right = Subject(
    kind="norm",
    name="sharded LayerNorm",
    build=lambda c: ShardedLayerNorm(c.d_model),
    forward=lambda m, x: m(x),
    declares={"norm": "layer", "norm_bias": True},
)
wrong = Subject(
    kind="norm",
    name="sharded LayerNorm v2",
    build=lambda c: ShardedLayerNormV2(c.d_model),
    forward=lambda m, x: m(x),
    declares={"norm": "layer", "norm_bias": True},
)

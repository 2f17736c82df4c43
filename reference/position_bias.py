"""Relative positions as a bias on the scores: ALiBi and T5 buckets."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


def alibi_slopes(num_heads: int) -> list[float]:
    """Return the slope of each head: 2^(-8 i / H), i = 1..H, for a power of two; else the published interleaving.

    For other H, the slopes of the next lower power of two come first, then every other slope of the next higher one.

    Source: Press et al. 2022, section 3 and the authors' code.

    >>> alibi_slopes(2)
    [0.0625, 0.00390625]
    """
    lower = 2 ** math.floor(math.log2(num_heads))
    slopes = [2.0 ** (-8.0 * i / lower) for i in range(1, lower + 1)]
    higher = [2.0 ** (-8.0 * i / (2 * lower)) for i in range(1, 2 * lower + 1)]
    return (slopes + higher[0::2])[:num_heads]


class AlibiBias(nn.Module):
    """Bias -slope_h * |t - s|; symmetric, so that a bidirectional encoder can use it too. No parameters."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.slopes: Tensor
        self.register_buffer("slopes", torch.tensor(alibi_slopes(num_heads), dtype=torch.float64), persistent=False)

    def forward(self, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        """Return `[B, H, T, S]` for positions `[B, T]` and `[B, S]`."""
        distance = (query_positions[:, :, None] - key_positions[:, None, :]).abs()
        return -self.slopes[None, :, None, None] * distance[:, None].to(self.slopes.dtype)


def t5_bucket(relative: Tensor, *, bidirectional: bool, num_buckets: int, max_distance: int) -> Tensor:
    """Map key position minus query position to a bucket.

    Half of the (remaining) buckets are exact distances, the rest grow logarithmically up to `max_distance`, beyond
    which all share the last. A bidirectional bias spends half of its buckets on the future; else the future is 0.

    Args:
        relative: int64, any shape, s - t.
        bidirectional: whether past and future are told apart.
        num_buckets: in all.
        max_distance: distance that reaches the last bucket.

    Returns:
        int64 of the same shape, in [0, num_buckets).

    Source: Raffel et al. 2020, section 2.1 and the authors' code.

    >>> t5_bucket(torch.tensor([0, -1, -500]), bidirectional=False, num_buckets=32, max_distance=128).tolist()
    [0, 1, 31]
    """
    bucket = torch.zeros_like(relative)
    if bidirectional:
        num_buckets //= 2
        bucket = bucket + (relative > 0).long() * num_buckets
        distance = relative.abs()
    else:
        distance = (-relative).clamp(min=0)
    exact = num_buckets // 2
    ratio = (distance.clamp(min=1).double() / exact).log() / math.log(max_distance / exact)
    # at a boundary the product is a whole number; 1e-9 keeps its rounding from falling into the bucket below
    far = (exact + (ratio * (num_buckets - exact) + 1e-9).floor().long()).clamp(max=num_buckets - 1)
    return bucket + torch.where(distance < exact, distance, far)


class T5Bias(nn.Module):
    """One trained number for every bucket of relative distance and every head."""

    def __init__(self, num_heads: int, *, bidirectional: bool, num_buckets: int = 32, max_distance: int = 128) -> None:
        super().__init__()
        self.bidirectional, self.num_buckets, self.max_distance = bidirectional, num_buckets, max_distance
        self.table = nn.Embedding(num_buckets, num_heads)

    def forward(self, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        """Return `[B, H, T, S]` for positions `[B, T]` and `[B, S]`."""
        bucket = t5_bucket(
            key_positions[:, None, :] - query_positions[:, :, None],
            bidirectional=self.bidirectional,
            num_buckets=self.num_buckets,
            max_distance=self.max_distance,
        )
        return self.table(bucket).permute(0, 3, 1, 2)


class NoBias(nn.Module):
    """Nothing is added to the scores."""

    def forward(self, query_positions: Tensor, key_positions: Tensor) -> None:
        """Return None."""
        return None

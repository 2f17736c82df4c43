"""Attention in half precision over thousands of keys, and of queries: inputs on which a sum in half sticks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

HALVES = ("bfloat16", "float16")
LENGTHS = ((9, 4097), (2561, 3))
"""Queries and keys: a sum in bfloat16 stops growing at 256 equal terms, one in float16 at 2048, and one of tiles loses
a bit or two over 32 of them."""

_PERIOD = 127

CHANNELS = 64
"""Of a head, as most fused kernels take; the scale is a power of two."""


def level(
    normal: Callable[..., Tensor], queries: int, keys: int, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return queries, keys, values `[1, 1, T or S, 64]` and what the output is weighed with, float64.

    Scores lie within 0.3 of one another, so that all keys weigh alike, and rounding moves them little. All terms of all
    sums have one sign: half of the channels of a value lie around numbers from 1 to 2, so that sums of theirs are not
    rounded alike; in the others they are 1 and -1 in turn, as are the channels of their key, and that is what the
    output is weighed with.
    """
    half = CHANNELS // 2
    turns = torch.where(torch.arange(keys) % 3 == 1, 1.0, -1.0).to(torch.float64)[:, None]
    noise = [_repeated(normal, n) / 8 for n in (queries, keys, keys, queries)]
    turns = turns.to(noise[0].device)
    query, key = (1 + noise[0]) / (128 * scale), turns / 2 + noise[1]
    values = torch.cat([torch.linspace(1, 2, half).to(turns).expand(keys, -1), turns.expand(-1, half)], -1)
    weight = torch.cat([torch.full((half,), 1 / 16), torch.ones(half)]).to(noise[0])
    return query, key, values + noise[2], weight * (1 + noise[3])


def _repeated(normal: Callable[..., Tensor], length: int) -> Tensor:
    """Return `[1, 1, length, 64]`, a prime number of rows again and again: drawing all takes longer than a call."""
    return normal(1, 1, _PERIOD, CHANNELS).repeat(1, 1, -(-length // _PERIOD), 1)[:, :, :length]

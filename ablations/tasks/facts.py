"""What only storage helps with: fixed random tables, asked evenly or by Zipf's law."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from veriformer.ablations.tasks.task import IGNORED, Sampler, Samples, Task, register

BASE = 64
"""Tokens that a key is written with, two of them; answers are tokens too."""

FACTS, ANSWERS = BASE * BASE, 16
"""Rows of the table, 4 bits each, and what may stand in one. The table is a function of nothing: all seeds learn it."""

ZIPF = 1.5
"""Exponent of how often a fact is asked: p_k goes with k^-1.5, so that Hutter 2021 foretells how the error falls."""


@functools.cache
def table() -> Tensor:
    """Return the answer to every key, int64 `[FACTS]`."""
    return torch.randint(ANSWERS, (FACTS,), generator=torch.Generator().manual_seed(0))


@functools.cache
def zipf() -> Tensor:
    """Return how often each key is asked, float64 `[FACTS]`; the most frequent first."""
    weight = torch.arange(1, FACTS + 1, dtype=torch.float64) ** -ZIPF
    return weight / weight.sum()


def _asked(keys: Tensor) -> Samples:
    """Ask the table for keys `[B]`: two tokens, the answer at the second."""
    labels = torch.stack([torch.full_like(keys, IGNORED), table()[keys]], dim=1)
    return Samples((torch.stack([keys // BASE, keys % BASE], dim=1),), labels)


def _evenly(generator: torch.Generator, number: int, length: int) -> Samples:
    return _asked(torch.randint(FACTS, (number,), generator=generator))


def _by_zipf(generator: torch.Generator, number: int, length: int) -> Samples:
    draws = torch.rand(number, generator=generator, dtype=torch.float64)
    return _asked(torch.searchsorted(zipf().cumsum(dim=0), draws).clamp(max=FACTS - 1))


def best_constant(weights: Tensor) -> float:
    """Return the accuracy of always giving the answer that is right most often, for keys of these `weights`."""
    return float(torch.zeros(ANSWERS, dtype=weights.dtype).index_add_(0, table(), weights).max())


def _table_task(name: str, statement: str, sample: Sampler, weights: Tensor) -> Task:
    return Task(
        name=name,
        statement=statement,
        architecture="decoder",
        vocab_size=BASE,
        length=2,
        chance=best_constant(weights),
        needs=("parameters",),
        sample=sample,
    )


register(
    _table_task("facts", f"know a fixed random table of {FACTS:,} pairs", _evenly, torch.full((FACTS,), 1 / FACTS)),
    _table_task("zipf-facts", f"know that table where a few of its {FACTS:,} pairs are asked most", _by_zipf, zipf()),
)

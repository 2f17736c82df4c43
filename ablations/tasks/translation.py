"""Tasks of an encoder-decoder: a source, and a target whose every token is asked."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from veriformer.ablations.tasks.task import SORTED_BLIND, Sampler, Samples, Task, register

SYMBOLS, START = 8, 8
LENGTH = 6


def _pairs(change: Callable[[Tensor], Tensor]) -> Sampler:
    def sample(generator: torch.Generator, number: int, length: int) -> Samples:
        source = torch.randint(SYMBOLS, (number, length), generator=generator)
        answer = change(source)
        target = torch.cat([torch.full((number, 1), START), answer[:, :-1]], dim=1)
        return Samples((source, target), answer)

    return sample


register(
    Task(
        name="translate-reverse", statement="write the source backwards", architecture="encoder_decoder",
        vocab_size=9, length=LENGTH, chance=1 / SYMBOLS, needs=("positions", "cross-attention"),
        sample=_pairs(lambda x: x.flip(1)),
    ),
    Task(
        name="translate-sort", statement="write the source in ascending order", architecture="encoder_decoder",
        vocab_size=9, length=LENGTH, chance=SORTED_BLIND, needs=("cross-attention",),
        sample=_pairs(lambda x: x.sort(dim=1).values),
    ),
)  # fmt: skip

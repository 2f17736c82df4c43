"""A memory that is taken in blocks: which orders of it make a difference."""

from __future__ import annotations

import torch
from torch import Tensor

from veriformer.properties.causes.structure import off_the_record
from veriformer.properties.definitions.differences import size_of
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.stream import Stream

_LONGEST = 40
_TRIES = 3


def blocks_of_memory(case: Case, stream: Stream) -> str | None:
    """Say from which length on the order of a memory matters, and whether it does within blocks of that length, too.

    Args:
        case: of a permutation that changed the output.
        stream: the subject, seen from its memory.
    """
    longest = min(_LONGEST, case.subject.longest or _LONGEST)
    with off_the_record(case):
        first = next((n for n in range(2, longest + 1) if _matters(case, stream, n, n)), None)
        if first is None or first == 2 or 2 * (first - 1) > longest:
            return None
        block = first - 1
        across, within = (_matters(case, stream, 2 * block, size) for size in (2 * block, block))
    if not across or within:
        return None
    return (
        f"the order of up to {block} places of the memory makes no difference, and of more it does, but not within "
        f"each {block} of them: the memory is taken in blocks of {block}, and what is kept from one to the next (a "
        "maximum, a sum, what is added up) is not joined rightly, as where it is not rescaled to a new maximum"
    )


def _matters(case: Case, stream: Stream, length: int, block: int) -> bool:
    """Whether the outputs change where the places of each block of a memory change places with one another."""
    generator = torch.Generator().manual_seed(length)
    for _ in range(_TRIES):
        memory: Tensor = 2 * stream.draw(2, length) if not case.subject.takes_tokens else stream.draw(2, length)
        order = torch.cat([start + torch.randperm(block, generator=generator) for start in range(0, length, block)]).to(
            memory.device
        )
        before, after = stream(memory), stream(memory[:, order])
        if float((before - after).abs().max()) > 8 * case.tolerance() * size_of(before):
            return True
    return False

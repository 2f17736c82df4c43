"""Is a sequence told from its rearrangements? Order tasks, and controls that need no order.

Token 0 is `a`, token 1 is `b`, the others are fillers. In *precede* and *bigram* a swap of `a` and `b` keeps the
multiset of tokens and turns the label, so a model that cannot see order is at 1/2 exactly on a test set that is closed
under the swap; the held-out set is: every second sample is the swap of the one before.
"""

from __future__ import annotations

import torch
from torch import Tensor

from veriformer.ablations.tasks.task import Sampler, Samples, Task, register

VOCABULARY, LENGTH = 8, 8
A, B = 0, 1


def _fillers(generator: torch.Generator, number: int, length: int) -> Tensor:
    return torch.randint(2, VOCABULARY, (number, length), generator=generator)


def _two_places(generator: torch.Generator, number: int, length: int) -> Tensor:
    """Return two different positions, `[B, 2]`, in random order."""
    return torch.rand(number, length, generator=generator).argsort(dim=1)[:, :2]


def _closed_under_swap(tokens: Tensor, labels: Tensor) -> Samples:
    """Let every sample be followed by its swap of a and b, whose label is the other."""
    swapped = torch.where(tokens == A, B, torch.where(tokens == B, A, tokens))
    both = torch.stack([tokens, swapped], dim=1).flatten(0, 1)
    return Samples((both,), torch.stack([labels, 1 - labels], dim=1).flatten())


def precede(generator: torch.Generator, number: int, length: int) -> Samples:
    """Ask whether the one a stands before the one b."""
    half = number // 2
    places = _two_places(generator, half, length)
    tokens = _fillers(generator, half, length)
    tokens.scatter_(1, places[:, :1], A).scatter_(1, places[:, 1:], B)
    return _closed_under_swap(tokens, (places[:, 0] < places[:, 1]).long())


def _bigram(generator: torch.Generator, number: int, length: int) -> Samples:
    half = number // 2
    first = torch.randint(length - 1, (half, 1), generator=generator)
    flip = torch.rand(half, 1, generator=generator) < 0.5
    tokens = _fillers(generator, half, length)
    tokens.scatter_(1, first + flip.long(), A).scatter_(1, first + (~flip).long(), B)
    return _closed_under_swap(tokens, (~flip[:, 0]).long())


def _first(generator: torch.Generator, number: int, length: int) -> Samples:
    # exactly half of each class, else the majority would tell what stands first more often than not
    order = torch.rand(number, length, generator=generator).argsort(dim=1)
    tokens = (order < length // 2).long()
    return Samples((tokens,), tokens[:, 0].clone())


def _majority(generator: torch.Generator, number: int, length: int) -> Samples:
    more = torch.randint(2, (number,), generator=generator)
    spread = torch.randint(1, length // 2 + 1, (number,), generator=generator)  # a majority by at least two
    ones = torch.where(more == 1, length // 2 + spread, length // 2 - spread)
    order = torch.rand(number, length, generator=generator).argsort(dim=1)
    return Samples(((order < ones[:, None]).long(),), more)


def _count(generator: torch.Generator, number: int, length: int) -> Samples:
    times = torch.randint(4, (number,), generator=generator)
    order = torch.rand(number, length, generator=generator).argsort(dim=1)
    return Samples((torch.where(order < times[:, None], A, _fillers(generator, number, length)),), times)


def _needle(generator: torch.Generator, number: int, length: int) -> Samples:
    """One token of class 0..3 among fillers 4.."""
    label = torch.randint(4, (number,), generator=generator)
    tokens = torch.randint(4, VOCABULARY, (number, length), generator=generator)
    place = torch.randint(length, (number, 1), generator=generator)
    return Samples((tokens.scatter_(1, place, label[:, None]),), label)


def _classes(
    name: str, statement: str, sample: Sampler, *, classes: int = 2, needs: tuple[str, ...] = (), length: int = LENGTH,
    symbols: tuple[str, ...] = (),
) -> Task:  # fmt: skip
    return Task(
        name=name,
        statement=statement,
        architecture="classifier",
        vocab_size=VOCABULARY,
        length=length,
        chance=1 / classes,
        num_classes=classes,
        needs=needs,
        symbols=symbols,
        sample=sample,
    )


ORDER, AB = ("positions",), ("a", "b")
register(
    _classes("precede", "does the one a stand before the one b?", precede, needs=ORDER, symbols=AB),
    _classes("bigram", "is it ab or ba that stands somewhere in the sequence?", _bigram, needs=ORDER, symbols=AB),
    _classes("first", "which of two tokens, as many of one as of the other, stands first?", _first, needs=ORDER),
    _classes("count", "how often does a occur, 0 to 3 times?", _count, classes=4, symbols=("a",)),
    _classes("majority", "which of two tokens is the more frequent?", _majority),
    _classes("needle", "which of four tokens is hidden among 31 fillers?", _needle, classes=4, length=32),
)

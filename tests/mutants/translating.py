"""Faults of what an encoder-decoder generates behind a source: rows that do not end, tokens that are forgotten."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from veriformer.properties.subject.subject import Subject
from veriformer.reference.model import build
from veriformer.tests.mutants import fault
from veriformer.tests.mutants.mending import put
from veriformer.tests.mutants.parts import sized

BOS, END, PAD = 1, 2, 0
Keep = Callable[[Tensor, Tensor], Tensor]


def padded(token: Tensor, done: Tensor) -> Tensor:
    return torch.where(done, PAD, token)


def all_of_it(text: Tensor) -> Tensor:
    return text


def its_own(source: Tensor) -> Tensor:
    return source


def all_done(done: Tensor) -> Tensor:
    return done.all()


def translator(
    keep: Keep = padded,
    seen: Callable[[Tensor], Tensor] = all_of_it,
    of: Any = its_own,
    ends: Callable[[Tensor], Tensor] = all_done,
) -> Subject:
    ends = ends if ends is all_done else put(ends, instead_of=all_done)
    keep = keep if keep is padded else put(keep, instead_of=padded)
    seen = seen if seen is all_of_it else put(seen, instead_of=all_of_it)
    of = of if of is its_own else put(of, instead_of=its_own)

    def generate(model: nn.Module, source: Tensor, steps: int, use_cache: bool) -> Tensor:
        text = torch.full((len(source), 1), BOS, device=source.device)
        done = torch.zeros(len(source), dtype=torch.bool, device=source.device)
        for _ in range(steps):
            token = keep(model(of(source), seen(text))[:, -1].argmax(-1), done)
            text = torch.cat([text, token[:, None]], dim=1)
            done = done | (token == END)
            if bool(ends(done)):
                break
        return text

    return Subject(
        kind="encoder_decoder",
        build=lambda c: build(sized(c, architecture="encoder_decoder")),
        forward=lambda m, source, target: m(source, target),
        mask_forms=(),
        generate=generate,
    )


@fault(
    "translate-goes-on",
    "A row that has ended gets further tokens until all rows of the batch have ended",
    killed_by=("decoding.generate",),
    cause="a row that has ended",
)
def goes_on() -> Subject:
    return translator(keep=lambda token, done: token)


@fault(
    "translate-forgets",
    "The decoder is not given the newest token",
    killed_by=("decoding.generate",),
    cause="the newest token is left out",
)
def forgets() -> Subject:
    return translator(seen=lambda text: text[:, :-1] if text.shape[1] > 1 else text)


@fault(
    "translate-newest",
    "The decoder is given the newest token alone, as if a cache kept the others",
    killed_by=("decoding.generate",),
    cause="the newest token alone",
)
def newest() -> Subject:
    return translator(seen=lambda text: text[:, -1:])


@fault(
    "translate-first-source",
    "All rows are behind the first source of the batch",
    killed_by=("decoding.generate",),
    cause="what other rows of a batch are given",
)
def first_source() -> Subject:
    return translator(of=lambda source: source[:1].expand_as(source))


@fault(
    "translate-cut-off",
    "Generation ends for all rows as soon as one has ended",
    killed_by=("decoding.generate",),
    cause="end together, as soon as one of them has ended",
)
def cut_off() -> Subject:
    return translator(ends=lambda done: done.any())

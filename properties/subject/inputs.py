"""Ordinary inputs of every kind of subject: what the engine calls a subject with before it judges it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from veriformer.properties.subject.sizes import DrawnConfig
from veriformer.properties.subject.subject import Subject


@dataclass(frozen=True)
class Inputs:
    """Arguments of one call, after the model.

    Attributes:
        tensors: positional tensors, the primary one first.
        extras: positional arguments that are no tensors, given after them.
        shape: of the output; None for an axis of any size.
    """

    tensors: list[Tensor]
    extras: tuple[Any, ...] = ()
    shape: tuple[int | None, ...] = field(default=())


_B, _T, _S = 2, 5, 7  # two samples, and lengths that differ from one another and from the usual sizes


def _lengths(subject: Subject) -> tuple[int, int]:
    """Return two lengths: 5 and 7, or two as long as the subject's shortest, or its longest."""
    longest = subject.longest or subject.shortest + _S
    return min(max(_T, subject.shortest), longest), min(max(_S, subject.shortest + _S - _T), longest)


def _sequence(
    subject: Subject, config: DrawnConfig, batch: int, length: int, generator: torch.Generator, dtype: torch.dtype
) -> Tensor:
    if subject.takes_tokens:
        return torch.randint(0, config.vocab_size, (batch, length), generator=generator)
    return torch.randn((batch, length, config.d_model), generator=generator, dtype=torch.float64).to(dtype)


def _normal(shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


Maker = Callable[[Subject, DrawnConfig, torch.Generator, torch.dtype], Inputs]


def _softmax(subject: Subject, config: DrawnConfig, generator: torch.Generator, dtype: torch.dtype) -> Inputs:
    extras = (-1,) if subject.accepts("dim") else ()
    return Inputs([_normal((_B, 3, _T), generator, dtype)], extras, (_B, 3, _T))


def _attention(subject: Subject, config: DrawnConfig, generator: torch.Generator, dtype: torch.dtype) -> Inputs:
    query = (_B, config.num_heads, _T, config.d_head)
    key = (_B, config.num_heads, _S, config.d_head)
    tensors = [_normal(shape, generator, dtype) for shape in (query, key, key)]
    return Inputs(tensors, (), query)


def _one_sequence(subject: Subject, config: DrawnConfig, generator: torch.Generator, dtype: torch.dtype) -> Inputs:
    length = _lengths(subject)[0]
    x = _sequence(subject, config, _B, length, generator, dtype)
    return Inputs([x], (), (_B, length, None) if subject.takes_tokens else (_B, length, config.d_model))


def _free_width(subject: Subject, config: DrawnConfig, generator: torch.Generator, dtype: torch.dtype) -> Inputs:
    length = _lengths(subject)[0]
    return Inputs([_sequence(subject, config, _B, length, generator, dtype)], (), (_B, length, None))


def _pooled(subject: Subject, config: DrawnConfig, generator: torch.Generator, dtype: torch.dtype) -> Inputs:
    return Inputs([_sequence(subject, config, _B, _lengths(subject)[0], generator, dtype)], (), (_B, None))


def _two_sequences(subject: Subject, config: DrawnConfig, generator: torch.Generator, dtype: torch.dtype) -> Inputs:
    lengths = _lengths(subject)
    first, second = (_sequence(subject, config, _B, n, generator, dtype) for n in lengths)
    if subject.kind == "encoder_decoder":
        return Inputs([second, first], (), (_B, lengths[0], None))
    return Inputs([first, second], (), (_B, lengths[0], config.d_model))


def _positions(subject: Subject, config: DrawnConfig, generator: torch.Generator, dtype: torch.dtype) -> Inputs:
    return Inputs([], (_T,), (_T, None))


def _rotary(subject: Subject, config: DrawnConfig, generator: torch.Generator, dtype: torch.dtype) -> Inputs:
    shape = (_B, config.num_heads, _T, config.d_head)
    return Inputs([_normal(shape, generator, dtype), torch.arange(_T)], (), shape)


def _bias(subject: Subject, config: DrawnConfig, generator: torch.Generator, dtype: torch.dtype) -> Inputs:
    keys = _T if subject.fact("equal_lengths") else _S
    return Inputs([], (_T, keys), (None, _T, keys))


def _loss(subject: Subject, config: DrawnConfig, generator: torch.Generator, dtype: torch.dtype) -> Inputs:
    labels = torch.randint(0, config.vocab_size, (_B, _T), generator=generator)
    return Inputs([_normal((_B, _T, config.vocab_size), generator, dtype), labels], (), ())


_MAKERS: Mapping[str, Maker] = {
    "softmax": _softmax,
    "attention": _attention,
    "self_attention": _one_sequence,
    "cross_attention": _two_sequences,
    "positions": _positions,
    "rotary": _rotary,
    "position_bias": _bias,
    "norm": _one_sequence,
    "feed_forward": _one_sequence,
    "layer": _one_sequence,
    "encoder": _free_width,
    "decoder": _free_width,
    "encoder_decoder": _two_sequences,
    "classifier": _pooled,
    "loss": _loss,
}


def is_too_short(subject: Subject, args: Sequence[Any]) -> bool:
    """Whether one of the sequences of a call `[B, T]` or `[B, T, D]` is shorter than the subject's are."""
    if subject.shortest == 1:
        return False
    return any(isinstance(x, Tensor) and x.ndim > 1 and x.shape[1] < subject.shortest for x in args)


def ordinary(subject: Subject, config: DrawnConfig, generator: torch.Generator, dtype: torch.dtype) -> Inputs:
    """Return ordinary inputs of the subject's kind: unit normal values or uniform tokens, B=2, T=5, S=7, or longer.

    Raises:
        KeyError: the kind has no ordinary inputs yet.
    """
    return _MAKERS[subject.kind](subject, config, generator, dtype)


def has_ordinary_inputs(kind: str) -> bool:
    """Whether `ordinary` knows the kind."""
    return kind in _MAKERS

"""Gradients under a padding mask: a backward that forgets the mask; part of `padding.content-irrelevant`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from veriformer.properties.bench.measured import makes_choices
from veriformer.properties.causes.structure import off_the_record
from veriformer.properties.definitions.differences import size_of
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.stream import Stream

_ROUNDED = {torch.float64: 1e-3, torch.float32: 1e-2}
"""Gradients that are off by more of their size are others; what is hidden has none, so that these are equal but for
the order of sums."""


def padding_leaves_gradients_alone(
    case: Case, stream: Stream, x: Tensor, changed: Tensor, mask: Tensor, real: Callable[[Tensor], Tensor]
) -> None:
    """Require that the gradients of the weights by the real outputs do not depend on what stands under the mask.

    Outputs may be right and gradients not, where the backward computes the forward anew, or is written by hand.
    Looked at once for each side of a model.

    Args:
        case: of padded sequences.
        stream: that they go into.
        x: they.
        changed: the same with other content under the mask.
        mask: `[B, T]`.
        real: gives the outputs that count.
    """
    key, module, unit = ("gradients under a mask", stream.side), stream.built.module, _ROUNDED.get(stream.built.dtype)
    if key in case.bench.measured or case.reaches or unit is None or not isinstance(module, nn.Module):
        return
    weights = [p for p in module.parameters() if p.requires_grad and p.numel()]
    out = real(stream(x, mask))
    if not weights or not out.requires_grad or makes_choices(case.bench, stream.built):
        return
    probe = case.normal(*out.shape, dtype=out.dtype)
    expected, got = (_gradients((y * probe).sum(), weights) for y in (out, real(stream(changed, mask))))
    if not bool(expected.isfinite().all()):
        return  # of NaN behind a query that sees padding alone others speak
    case.close(
        got,
        expected,
        "the gradients of the weights change with what stands at padded positions",
        bound=unit * size_of(expected),
        constants_allowed=True,
        cause=lambda: _without_the_mask(case, stream, x, mask, probe, real, weights),
    )
    case.bench.measured[key] = True


def _gradients(total: Tensor, weights: list[nn.Parameter]) -> Tensor:
    found = torch.autograd.grad(total, weights, allow_unused=True, materialize_grads=True)
    return torch.cat([g.flatten() for g in found])


def _without_the_mask(
    case: Case,
    stream: Stream,
    x: Tensor,
    mask: Tensor,
    probe: Tensor,
    real: Callable[[Tensor], Tensor],
    weights: list[nn.Parameter],
) -> str | None:
    """Say that the gradients under a mask are those of a call without one, where they are."""
    with off_the_record(case):
        masked, plain = (_gradients((real(stream(x, m)) * probe).sum(), weights) for m in (mask, torch.ones_like(mask)))
    if float((masked - plain).abs().max()) > _ROUNDED[plain.dtype] * float(plain.abs().max()):
        return "outputs are right, and their gradients are not: what is hidden in the forward is not in the backward"
    return (
        "outputs are right, and their gradients are those of a call without a mask: what the backward computes anew "
        "(a checkpoint, a derivative written by hand) is not given the mask"
    )

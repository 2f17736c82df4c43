"""How much a subject's output moves under rounding: measured on the subject itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from veriformer.properties.bench.guards import SubjectError
from veriformer.properties.bench.pool import duplicate
from veriformer.properties.definitions.differences import size_of, worst_difference
from veriformer.properties.definitions.rounding import GAP, epsilon

LAMBDA = 6.0
"""Deviations allowed in the probabilistic rounding bound; 2 exp(-LAMBDA^2 / 2) = 3e-8 is the chance to pass it."""


_SIGNS = 1_000_003
"""Signs that are drawn; larger tensors have them again and again. A prime, so that no two rows of one have the same."""


def nudged(value: Tensor, generator: torch.Generator, step: float) -> Tensor:
    """Return `value` with every entry moved by a relative `step`, up or down at random."""
    factors = 1 + step * _signs(value.numel(), generator).to(value.device, value.dtype)
    return _times(value, factors, 0)


def _signs(total: int, generator: torch.Generator) -> Tensor:
    return torch.randint(0, 2, (min(total, _SIGNS),), generator=generator, dtype=torch.int8) * 2 - 1


def _times(value: Tensor, factors: Tensor, at: int) -> Tensor:
    """Return a tensor times factors, one an entry, from the `at`-th on and round again where they end."""
    size, given = value.numel(), len(factors)
    at %= max(given, 1)
    if at + size <= given:
        return value * factors[at : at + size].view(value.shape)
    turned, whole = factors.roll(-at), size - size % given
    flat, moved = value.reshape(-1), torch.empty(size, dtype=value.dtype, device=value.device)
    torch.mul(flat[:whole].view(-1, given), turned, out=moved[:whole].view(-1, given))
    torch.mul(flat[whole:], turned[: size - whole], out=moved[whole:])
    return moved.view(value.shape)


def sensitivity(
    module: Any,
    call: Callable[[Any, list[Tensor]], Tensor],
    inputs: list[Tensor],
    dtype: torch.dtype,
    generator: torch.Generator,
    step: float,
    *,
    is_ours: bool = False,
) -> float:
    """Measure how far the output moves, relative to its size, when parameters and inputs move by `step`.

    Args:
        module: left as it is; somebody's own instance is copied, one that the suite built gets its values back.
        call: `call(module, inputs)` gives the output.
        inputs: floating point ones are moved, token ids stay.
        dtype: of the arithmetic.
        generator: private.
        step: relative size of the move.
        is_ours: whether the suite built the module.

    Returns:
        Largest change over two moves, divided by the root mean square of the output.
    """
    with torch.no_grad():
        base = call(module, inputs)
        size = size_of(base)
        twin = module if is_ours else _twin_of(module)
        worst = 0.0
        with restored(twin) as kept:
            for _ in range(2):
                _nudge(kept, generator, step)
                moved = [nudged(x, generator, step) if x.is_floating_point() else x for x in inputs]
                worst = max(worst, worst_difference(call(twin, moved), base, size).error)
    return worst


def _twin_of(module: Any) -> Any:
    """Return a copy of a given model; one that refuses is moved itself, and put back to the bit."""
    try:
        return duplicate(module) if isinstance(module, nn.Module) else module
    except SubjectError:
        return module


def _nudge(kept: list[tuple[nn.Parameter, Tensor]], generator: torch.Generator, step: float) -> None:
    """Set parameters to their values as `nudged` would move them one by one; the signs of all are drawn at once."""
    total, at = sum(value.numel() for _, value in kept), 0
    signs = _signs(total, generator)
    factors: dict[tuple[torch.device, torch.dtype], Tensor] = {}
    for parameter, value in kept:
        key = (value.device, value.dtype)
        if key not in factors:
            factors[key] = 1 + step * signs.to(*key)
        parameter.data.copy_(_times(value, factors[key], at))
        at += value.numel()


@contextmanager
def restored(module: Any) -> Iterator[list[tuple[nn.Parameter, Tensor]]]:
    """Hold the floating point parameters of a module with their values, and put these back to the bit.

    By `.data`, which leaves no trace in graphs that were recorded before: the values that they hold on to are back
    when they are walked.
    """
    parameters = module.parameters() if isinstance(module, nn.Module) else ()
    kept = [(p, p.detach().clone()) for p in parameters if p.is_floating_point()]
    try:
        yield kept
    finally:
        for parameter, value in kept:
            parameter.data.copy_(value)


def allowance(floor: float, dtype: torch.dtype, longest: int) -> float:
    """Turn the measured sensitivity to one-epsilon moves into a tolerance for two evaluation orders.

    A backward stable computation is the exact one at data moved by at most LAMBDA sqrt(n) u, n the
    longest reduction (Higham & Mary 2019). Moving all data by eps = 2 u was measured to move the output by
    `floor`, so two evaluations differ by at most 2 * LAMBDA sqrt(n) / 2 * floor. Products of half-precision
    tensors are accumulated in float32, so n does not enter there: what remains are the roundings of the tensors
    themselves, one move a side, and as much again for the tensors between. Never below
    `least_tolerance`.
    """
    factor = 4.0 if dtype in (torch.bfloat16, torch.float16) else LAMBDA * longest**0.5
    return max(factor * floor, least_tolerance(dtype))


def least_tolerance(dtype: torch.dtype) -> float:
    """Return what every tolerance is at least, in outputs that happen to be insensitive."""
    return 16 * epsilon(dtype)


def relative_tolerance(floor: float, dtype: torch.dtype, longest: int) -> float:
    """Return the allowance, at most `GAP`: a chaotic subject cannot buy itself leniency."""
    return min(allowance(floor, dtype, longest), GAP[dtype])

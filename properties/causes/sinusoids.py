"""Wrong tables of sinusoidal positions that have been seen, and which of them explains a table."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from veriformer.properties.definitions.differences import worst_difference
from veriformer.properties.definitions.sinusoids import closed_form, table_bound


def wrong_tables(length: int, width: int, base: float) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Yield wrong tables `[T, D]`, each with the formula that gives it.

    Args:
        length: T.
        width: D.
        base: declared.
    """
    position = torch.arange(length, dtype=torch.float64)[:, None]
    pair, channel = torch.arange((width + 1) // 2, dtype=torch.float64), torch.arange(width, dtype=torch.float64)

    def woven(omega: Tensor) -> Tensor:
        angles = position * omega
        return torch.stack([angles.sin(), angles.cos()], -1).flatten(1)[:, :width]

    def by_channel(exponent: Tensor) -> Tensor:
        angles = position * base**-exponent
        return torch.where(torch.arange(width) % 2 == 0, angles.sin(), angles.cos())

    def scanned(*, sine_first: bool) -> Tensor:
        step = base ** (-2 * pair / width)
        sine, cosine = torch.zeros_like(step), torch.ones_like(step)
        rows = []
        for _ in range(length):
            rows.append(torch.stack([sine, cosine], -1).flatten())
            if sine_first:
                sine = sine * step.cos() + cosine * step.sin()
                cosine = cosine * step.cos() - sine * step.sin()
            else:
                cosine = cosine * step.cos() - sine * step.sin()
                sine = sine * step.cos() + cosine * step.sin()
        return torch.stack(rows)[:, :width]

    for first, second in (("sine", "cosine"), ("cosine", "sine")):
        yield (
            f"rows that are made of the one before, and the {second} of the {first} that is new already: the two are "
            "updated one after the other, not at once, so that it is no rotation",
            partial(scanned, sine_first=first == "sine"),
        )
    angles = position * base ** (-2 * pair / width)

    def paired(second: Callable[[], Tensor]) -> Tensor:
        return torch.stack([angles.sin(), second()], -1).flatten(1)[:, :width]

    for told, in_place in (
        ("the negative sine in the place of the cosine: a phase of pi, not of pi / 2", lambda: -angles.sin()),
        ("the sine in the place of the cosine, too: no phase", lambda: angles.sin()),
        ("the negative cosine: a phase of the wrong sign", lambda: -angles.cos()),
    ):
        yield told, partial(paired, in_place)
    yield "frequencies base^(-i/d) instead of base^(-2i/d)", lambda: woven(base ** (-pair / width))
    yield (
        "frequencies base^(-4i/d): the channel index was doubled once more",
        lambda: woven(base ** (-4 * pair / width)),
    )
    yield (
        "an exponent that grows with every channel, so that sine and cosine of a pair differ in frequency",
        lambda: by_channel(channel / width),
    )
    yield (
        "an exponent of 2 times the channel index, different for sine and cosine",
        lambda: by_channel(2 * channel / width),
    )
    yield (
        "a floor division in the exponent (operator precedence)",
        lambda: woven((2 * pair * (-math.log(base) / width // 2)).exp()),
    )
    yield "a floor division of log(base) by d", lambda: woven((2 * pair * (-math.log(base) // width)).exp())
    yield "integer arithmetic in the exponent", lambda: woven((2 * pair * int(-math.log(base) / width)).exp())
    yield "frequencies base^(-2i/(d-2)): endpoints included", lambda: woven(base ** (-2 * pair / max(width - 2, 1)))
    for other in (1000.0, 100000.0, 500000.0):
        yield f"base {other:g} instead of {base:g}", lambda other=other: woven(other ** (-2 * pair / width))  # type: ignore[misc]


def table_cause(table: Tensor, base: float, layout: str) -> str | None:
    """Name the wrong formula that gives a table, by trying those that have been seen; None if none fits.

    Args:
        table: `[T, D]`.
        base: declared.
        layout: declared, or the nearer one.
    """
    length, width = table.shape
    bound = table_bound(length, width, base, layout, table.dtype) * 4
    right = {name: closed_form(length, width, base, name) for name in ("interleaved", "halves")}
    other = "halves" if layout == "interleaved" else "interleaved"
    if worst_difference(table, right[other], bound).error <= 1:
        return f"the table equals the formula with channels in {other} order instead of {layout}"
    swapped = right[layout].clone()
    if layout == "halves":
        swapped = torch.cat([swapped[:, (width + 1) // 2 :], swapped[:, : (width + 1) // 2]], dim=1)
    elif width % 2 == 0:
        swapped = swapped.unflatten(1, (-1, 2)).flip(-1).flatten(1)
    if worst_difference(table, swapped, bound).error <= 1:
        return "the table equals the formula with sine and cosine swapped"
    for offset in (1, -1):
        if worst_difference(table, closed_form(length, width, base, layout, offset), bound).error <= 1:
            return f"the table equals the formula shifted by one position: it starts at position {offset}"
    if bool((table == table[0]).all()):
        return "all rows are equal"
    ratio = float((table.double() * right[layout]).sum() / right[layout].square().sum())
    if worst_difference(table.double(), ratio * right[layout], bound * max(1.0, abs(ratio))).error <= 1:
        return f"all values are {ratio:.4g} times those of the formula"
    woven = torch.cat([table[:, i :: (width + 1) // 2] for i in range((width + 1) // 2)], 1)
    laid = woven if layout == "halves" else table
    for words, wrong in wrong_tables(length, width, base):
        guess = wrong()
        if guess.shape == laid.shape and worst_difference(laid, guess, bound.amax()).error <= 1:
            return f"the table equals the formula with {words}"
    coarse = float((table.double() - right[layout]).abs().amax())
    if coarse < 0.05:
        return f"the table is near the formula but wrong by {coarse:.2g}: it was computed in too low a precision"
    return None

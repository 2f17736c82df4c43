"""Models that take one length alone: windows of an image laid out as a sequence or a grid, series of a given length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from veriformer.properties.adapters.unknown.arguments import Argument
from veriformer.properties.adapters.unknown.understanding import B, Understood, basis, embeds, unknown
from veriformer.properties.adapters.unknown.wiring import Wiring, tensors_in
from veriformer.properties.subject.sizes import DrawnConfig

_LONGEST = 128
_SIDES = (8, 6, 14, 10, 12, 16, 4, 7, 2, 32)
"""Sides of a grid of cells."""

_FEW = 16  # lengths in a row that one stride may take alike
_FILLED = "torch.nn.functional.pad(x, (0, 0, {length} - x.shape[1], 0))"


def of_one_length(sample: nn.Module, sizes: DrawnConfig, arguments: Sequence[Argument]) -> Understood | None:
    """Return the call of a model that takes `[B, L, D]` (or `[B, D, L]`, `[B, h, w, D]`) of one L alone; or None.

    Shorter sequences stand at its end, behind zeros; all that comes out is judged as one vector a sample.

    Args:
        sample: in eval mode.
        sizes: of it.
        arguments: of its forward.
    """
    given = basis(arguments, "x", sample)
    if embeds(sample) or unknown(arguments, given):
        return None
    for width in _widths(sample, sizes):
        for laid, told in _LAYOUTS:
            wiring = Wiring(("x",), {**given, "*first": laid.replace("x", "whole")})
            whole = replace(wiring, before=("whole = x",))
            taken = {n: at for n in range(1, _LONGEST + 1) if (at := _called(sample, whole, n, width)) is not None}
            length = _longest(sample, sorted(taken))
            if length is None or _called(sample, whole, 2 * length, width) is not None:
                continue
            return _wired(wiring, length, width, told, taken[length])
        for side in _SIDES:
            wiring = Wiring(("x",), {**given, "*first": f"whole.unflatten(1, ({side}, {side}))"})
            at = _called(sample, replace(wiring, before=("whole = x",)), side * side, width)
            if at is not None:
                return _wired(wiring, side * side, width, f" as a grid of {side} x {side}", at)
    return None


def _wired(wiring: Wiring, length: int, width: int, told: str, where: str) -> Understood:
    before = (f"whole = {_FILLED.format(length=length)}",)
    note = (
        f"takes {length} positions{told} alone: shorter sequences stand at the end, behind zeros, and all that comes "
        "out is judged as one vector a sample, as of a classifier"
    )
    wiring = replace(wiring, before=before, pick=f"{where}.flatten(1)")
    return Understood(
        "classifier", wiring, "embeddings", (), (note,), declares={"max_len": length},
        own_sizes={"d_model": width, "max_len": length},
    )  # fmt: skip


_LAYOUTS = (("x", ""), ("x.mT", " behind their channels"))


def _longest(sample: nn.Module, taken: list[int]) -> int | None:
    """Return the length that is meant: the end of the last run of lengths that are taken, or one there that is named.

    A few more than that may be taken where what does not fill a patch is cut off.
    """
    if not taken or taken[-1] == _LONGEST:
        return None
    last = [n for at, n in enumerate(taken) if len(taken) - at == taken[-1] - n + 1]
    named = [n for n in _numbers(sample, _LONGEST) if n in last]
    return named[0] if named else (last[-1] if len(last) < _FEW else None)


def _widths(sample: nn.Module, sizes: DrawnConfig) -> list[int]:
    """Return the channels that it may take: those of its sizes, then small numbers among its attributes."""
    return list(dict.fromkeys([sizes.d_model, *_numbers(sample, 64), 1, 3, 7]))[:12]


def _numbers(sample: nn.Module, largest: int) -> list[int]:
    """Return the integers among the attributes of a model and of its configuration."""
    holders = [sample, *(vars(sample)[n] for n in ("config", "configs", "cfg", "args") if n in vars(sample))]
    return [v for holder in holders for n, v in getattr(holder, "__dict__", {}).items()
            if type(v) is int and 0 < v <= largest and not n.startswith("_")]  # fmt: skip


def _called(sample: nn.Module, wiring: Wiring, length: int, width: int) -> str | None:
    """Return where in what comes out of as many positions the tensor is that is meant; None where it is refused."""
    x = torch.randn(B, length, width, generator=torch.Generator().manual_seed(0))
    try:
        output = wiring.call(sample, x)
    except Exception:
        return None
    return next((where for where, t in tensors_in(output) if _is_of_samples(t)), None)


def _is_of_samples(output: Tensor) -> bool:
    return output.is_floating_point() and output.ndim > 1 and len(output) == B

"""Widths of heads that a class takes: partial rotations, say, want a multiple of four."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from veriformer.properties.subject.sizes import DrawnConfig

_USUAL = ((8, 2), (16, 4), (8, 1))
_ODD = ((18, 3), (12, 6))
"""Widths and heads of the models that are drawn: of four and eight channels a head, and of six and two."""
_EVEN = {"d_model": (16, 32, 64, 128, 256), "num_heads": (1, 2, 4)}
_WITHIN = ((16, 4), (16, 2), (16, 1), (32, 4))


def widths_taken(runs: Callable[[DrawnConfig], Any]) -> tuple[dict[str, tuple[int, ...]], str]:
    """Return the domain of a class that takes heads of four channels and their multiples alone, and what to say of it.

    Empty where it takes others too, or not these.

    Args:
        runs: builds a model of sizes and calls it; raises what that raises.
    """
    problems = [problem for sizes in _ODD if (problem := _problem(runs, *sizes))]
    if len(problems) < len(_ODD) or any(_problem(runs, *sizes) for sizes in (*_USUAL, *_WITHIN)):
        return {}, ""
    return dict(_EVEN), f"judged with heads of 4 channels and multiples of these: with others it raised {problems[0]}"


def _problem(runs: Callable[[DrawnConfig], Any], width: int, heads: int) -> str:
    try:
        runs(DrawnConfig(d_model=width, num_heads=heads, num_key_value_heads=heads))
    except Exception as problem:
        return f"{type(problem).__name__}: {(str(problem).splitlines() or [''])[0]}"
    return ""

"""Rows of a sinusoidal table that are right and stand at a wrong position: of which positions they are."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from veriformer.properties.definitions.sinusoids import closed_form, table_bound

_ROWS = 1024
_RUNS = 8
"""More of them have no rule that one sentence could tell."""


@dataclass(frozen=True)
class _Run:
    """Rows from `start` to before `end`, which are those of positions first, first + step, first + 2 step ..."""

    start: int
    end: int
    first: int
    step: int

    def is_right(self, offset: int) -> bool:
        return self.first == self.start + offset and self.step == 1


def moved_rows(table: Tensor, base: float, layout: str, offset: int = 0) -> str | None:
    """Say from which position on the rows are those of other positions, and of which.

    Args:
        table: `[T, D]`.
        base: declared.
        layout: declared, or the nearer one.
        offset: the position of the first row.
    """
    rows = _positions_of(table[:_ROWS], base, layout, offset)
    repeats = next((n for n in (2, 3, 4) if rows == [offset + index // n for index in range(len(table))]), None)
    if repeats and len(table) > repeats:
        return f"every row stands at {repeats} positions, one behind the other"
    return positions_told(rows, offset, "the rows are those of") if rows else None


def positions_told(positions: list[int], offset: int, what: str) -> str | None:
    """Say from which place on other positions stand than offset, offset + 1 ..., and which; None where they do not.

    Args:
        positions: that stand there, in order.
        offset: that which is to stand at the first place.
        what: what is done, or had, before the name of a position.
    """
    runs = _runs(positions)
    if not runs or all(run.is_right(offset) for run in runs):
        return None
    wrong = [run for run in runs if not run.is_right(offset)]
    run = wrong[0]
    told = f"{what} {_named(run)}: {_why(run, offset)}"
    if len(runs) == 1:
        return told
    start, end = run.start + offset, run.end - 1 + offset
    if wrong == runs[-len(wrong) :] and all((each.first, each.step) == (run.first, run.step) for each in wrong):
        others = ", ".join(f"{other.start + offset}" for other in wrong[1:])
        return f"from position {start} on {told}{f'; so they do once more from position {others} on' if others else ''}"
    alone = " alone" if len(wrong) == 1 else ""
    return f"at position{f's {start} to {end}' if end > start else f' {start}'}{alone} {told}"


def period_cause(table: Tensor) -> str | None:
    """Say after how many positions the rows `[T, D]` of a table come again, where each does that is followed so far."""
    length = len(table)
    period = next((n for n in range(2, length // 2 + 1) if bool((table[n:] == table[:-n]).all())), None)
    return f"the rows come again after {period} positions" if period else None


def _positions_of(table: Tensor, base: float, layout: str, offset: int) -> list[int] | None:
    """Return the position whose row each row is; None where one is that of none."""
    length, width = table.shape
    low = min(0, offset) - 2
    known = closed_form(2 * length + offset - low, width, base, layout, low)
    noise = table_bound(2 * length, width, base, layout, table.dtype).amax()
    far = torch.cdist(table.double(), known, p=torch.inf)
    fits = far <= 2 * noise
    if not bool(fits.any(-1).all()):
        return None
    found: list[int] = []
    nearest = (far.argmin(-1) + low).tolist()
    for index, position in enumerate(nearest):  # where several fit, what goes on as before, or is right
        wanted = [found[-1] + 1] if found else []
        likely = [p for p in (*wanted, index + offset) if bool(fits[index, p - low])]
        found.append(likely[0] if likely else position)
    return found


def _runs(positions: list[int]) -> list[_Run] | None:
    """Part positions into stretches that go on by one step; None for too many of them."""
    runs, start = list[_Run](), 0
    while start < len(positions):
        end = start + 1
        step = positions[end] - positions[start] if end < len(positions) else 1
        while end < len(positions) and positions[end] - positions[end - 1] == step:
            end += 1
        if end - start == 2 and step != 1:  # a jump, behind which something else begins
            end, step = start + 1, 1
        runs.append(_Run(start, end, positions[start], step))
        start = end
        if len(runs) > _RUNS:
            return None
    return runs


def _named(run: _Run) -> str:
    count = run.end - run.start
    if run.step == 0 or count == 1:
        return f"position {run.first}"
    named = [f"{run.first + run.step * i}" for i in range(min(3, count))]
    return f"positions {', '.join(named)}{' ...' if count > 3 else ''}"


def _why(run: _Run, offset: int) -> str:
    by = run.first - run.start - offset
    if run.step == 0 and run.end - run.start > 1:
        return "one row stands in place of all others"
    if run.step == -1:
        return "they run backwards"
    if run.step != 1:
        return f"positions are multiplied by {run.step}"
    if run.first == offset and run.start:
        return "they begin again"
    many = "1 position" if abs(by) == 1 else f"{abs(by)} positions"
    return f"each stands {many} too {'early' if by > 0 else 'late'}"

"""From which length on a kernel is wrong: the size of a tile, where it can be measured."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from veriformer.properties.bench.guards import SubjectError
from veriformer.properties.diagnosis.derivatives.gradients import gradient_opinion
from veriformer.properties.diagnosis.kernels.kernels import kernel_condition, kernel_opinion
from veriformer.properties.diagnosis.kernels.tiling import PARTS, Situation, Tiling, planned
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.violations import Violation

_LENGTHS = (3, 4, 6, 8, 9, 12, 16, 17, 24, 32, 33, 48, 64, 65, 80, 96, 128, 129, 192, 256, 257, 320, 512, 513)
"""Tried one after another, up to the length that failed; what lies between a right and a wrong one is halved."""

_LARGEST = 256
"""Tiles of kernels are no larger; what begins beyond is another limit."""

_WORK = 5e10
"""Multiplications that it may take: a kernel of Python loops is left to others."""


def tile_opinion(case: Case, problem: Violation) -> str | None:
    """Say from which number of keys, queries or channels on a kernel is wrong, beside what others say of it."""
    tiling = Tiling(case, case.built())
    failed = next((s for s in map(tiling.fitted, planned(case)) if s and problem.headline.startswith(str(s))), None)
    if failed is None:
        return None
    part = next(i for i, name in enumerate(PARTS) if f"the {name} is not" in problem.headline)
    if empty := _nan_rows(tiling, failed):
        return empty
    measured = _Lengths(tiling, failed, part).told()
    if measured is None:
        return None
    if window := _window(tiling, failed, measured):
        return f"{measured}; with a window of {window} keys it is right: declare window={window} if that is meant"
    if part:  # its output is right there: the weights that it uses are too
        told = (gradient_opinion(case, problem) or "").partition("; right up to ")[0]
    else:
        told = _without_length(kernel_opinion(case, problem) or "", kernel_condition(case, problem) or "")
    return f"{measured}; {told}" if told else measured


def _nan_rows(tiling: Tiling, s: Situation) -> str | None:
    """Say how many of the first keys a row must not see to become NaN, where that alone tells these rows apart."""
    if not s.masked or s.causal:
        return None
    judged = tiling.judge(s, normal=tiling.steady())
    if judged.allow is None or not bool((bad := judged.pairs[0][0].isnan().any(-1)).any()):
        return None
    first = judged.allow.int().argmax(-1).expand(bad.shape)  # key that a row sees first
    if bool(bad.all()) or int(first[~bad].max()) >= (least := int(first[bad].min())):
        return None
    return (
        f"NaN in all rows from which the mask hides the first {least} keys or more, and in no others: a tile is empty"
    )


def _window(tiling: Tiling, s: Situation, measured: str) -> int | None:
    """Return the length up to which it is right, where with a window of that many keys it is right further on."""
    found = re.match(r"right up to (\d+) queries and keys", measured)
    if not found or tiling.window is not None:
        return None
    tiling.window = int(found[1])
    try:
        pairs = tiling.judge(s, normal=tiling.steady()).pairs
        is_right = all(bool(((got.double() - expected).abs() <= bound).all()) for got, expected, bound in pairs)
        return tiling.window if is_right else None
    finally:
        tiling.window = None


def _without_length(told: str, where: str) -> str:
    """Leave out a condition that gives lengths: they are known better here."""
    return told.removeprefix(f"{where}: ") if "right up to" in where or "multiple of" in where else told


def _with_keys(s: Situation, n: int) -> Situation:
    return replace(s, keys=n, queries=n) if s.causal and s.queries == s.keys else replace(s, keys=n)


class _Lengths:
    """A situation that fails, at other lengths."""

    def __init__(self, tiling: Tiling, failed: Situation, part: int) -> None:
        self.tiling = tiling
        self.failed = failed
        self.part = part
        self.left = _WORK

    def told(self) -> str | None:
        """Say where it begins to be wrong; nothing where it is wrong at once, or at no shorter length."""
        s = self.failed
        alike = s.causal and s.queries == s.keys
        axes: list[tuple[str, int, Callable[[int], Situation]]] = [
            ("queries and keys" if alike else "keys", s.keys, lambda n: _with_keys(s, n)),
        ]
        if not alike:
            axes.append(("queries", s.queries, lambda n: replace(s, queries=n)))
        axes.append(("channels of a head", s.width, lambda n: replace(s, width=n)))
        return next((words for axis in axes if (words := self._along(*axis))), None)

    def _along(self, name: str, longest: int, at: Callable[[int], Situation]) -> str | None:
        wrong = {n: w for n in (*_LENGTHS, longest) if n <= longest and (w := self._is_wrong(at(n))) is not None}
        bad = [n for n, is_wrong in wrong.items() if is_wrong]
        good = [n for n, is_wrong in wrong.items() if not is_wrong]
        if not bad or not good:
            return None
        for block in (128, 64, 32, 16, 8, 4):
            if len(good) > 1 and all((n % block == 0) == (not is_wrong) for n, is_wrong in wrong.items()):
                return f"wrong unless the number of {name} is a multiple of {block}: a tile of {block}"
        first = min(bad)
        last = max((n for n in good if n < first), default=0)
        while last and first - last > 1:
            middle = (first + last) // 2
            is_wrong = self._is_wrong(at(middle))
            if is_wrong is None:
                return None
            first, last = (middle, last) if is_wrong else (first, middle)
        if not last:
            return None
        again = [n for n in good if n > first]
        if again and any(n % last for n in again):
            return f"right up to {last} {name}, wrong with {first}"
        beyond = f"wrong with {first}, right with multiples of {last}" if again else f"wrong from {first} on"
        # a mask moves with the lengths, and one key too many is seen from the second row of a tile on
        is_tile = not self.failed.masked and (last & (last - 1)) == 0 and last <= _LARGEST
        return f"right up to {last} {name}, {beyond}" + f": a tile of {last}" * is_tile

    def _is_wrong(self, s: Situation) -> bool | None:
        """Tell whether it is; None where it refuses, or it would be too much work."""
        self.left -= self.tiling.foreseen(s)
        if self.left < 0:
            return None
        try:
            pairs = self.tiling.judge(s, normal=self.tiling.steady()).pairs
        except SubjectError:
            return None
        if self.part >= len(pairs):
            return None
        got, expected, bound = pairs[self.part]
        return got.shape != expected.shape or not bool(((got.double() - expected).abs() <= bound).all())

"""What one property saw while it was judged: counts, and its worst comparison."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Tally:
    """What one property saw.

    Attributes:
        examples: cases judged.
        witnesses: times the premise really held.
        comparisons: that were made, the one that failed among them.
        error: worst error, in the unit of its tolerance.
        tolerance: tolerance at that place.
        margin: worst error / tolerance; a violation has more than 1.
        paths: times each path was walked.
        measures: what was measured beside, the largest of each.
        subject_seconds: spent inside the subject.
        calls: of the subject.
        told: one sentence about what holds, for the report.
        given_up: reasons for which cases were given up before anything was compared.
        reach: by the name of a size, its smallest and largest value that was called with; words (dtypes) as a list.
        reached: sizes and dtypes of calls that are in `reach` already.
        unreached: what was left out though the property speaks of it, with the reason: "T 513 (memory)".
        wants_float64: whether the last case could not be told in float32 and is to be judged in float64.
    """

    examples: int = 0
    witnesses: int = 0
    comparisons: int = 0
    error: float = 0.0
    tolerance: float = 0.0
    margin: float = 0.0
    paths: dict[str, int] = field(default_factory=dict)
    measures: dict[str, float] = field(default_factory=dict)
    subject_seconds: float = 0.0
    calls: int = 0
    told: str = ""
    given_up: set[str] = field(default_factory=set)
    reach: dict[str, list[Any]] = field(default_factory=dict)
    unreached: list[str] = field(default_factory=list)
    wants_float64: bool = False
    reached: dict[tuple[Any, ...], object] = field(default_factory=dict)

    def note(self, error: float, tolerance: float) -> None:
        """Keep the comparison if its margin is the worst so far."""
        margin = error / tolerance if tolerance > 0 else (0.0 if error == 0 else math.inf)
        if margin >= self.margin:
            self.error, self.tolerance, self.margin = error, tolerance, margin

    def note_reach(self, sizes: Mapping[str, int | str]) -> None:
        """Keep the ends of what was called with."""
        for name, value in sizes.items():
            seen = self.reach.setdefault(name, [value] if isinstance(value, str) else [value, value])
            if isinstance(value, str):
                if value not in seen:
                    seen.append(value)
            elif value < seen[0]:
                seen[0] = value
            elif value > seen[1]:
                seen[1] = value

    def note_all_reach(self, reach: Mapping[str, list[Any]]) -> None:
        """Keep the ends of what another tally was called with."""
        for name, seen in reach.items():
            for value in seen:
                self.note_reach({name: value})

    def note_unreached(self, told: str) -> None:
        """Keep, once, what was left out and why."""
        if told not in self.unreached:
            self.unreached.append(told)

    def note_worst_of(self, other: Tally) -> None:
        """Take over the worst comparison of another tally, and the time that it spent."""
        if other.margin >= self.margin:
            self.error, self.tolerance, self.margin = other.error, other.tolerance, other.margin
        self.note_effort_of(other)

    def note_effort_of(self, other: Tally) -> None:
        """Take over the calls of another tally, and the time that they took."""
        self.subject_seconds += other.subject_seconds
        self.calls += other.calls

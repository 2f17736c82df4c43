"""What a check can raise: a violation of the property, or a reason why nothing could be judged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class InfluenceMap:
    """Which input position reaches which output position.

    Attributes:
        magnitude: `[T, S]` nested lists; entry `[t][s]` is the size of d out_t / d in_s (or of the change).
        allowed: `[T, S]` nested lists; whether position `t` may see position `s`.
    """

    magnitude: Sequence[Sequence[float]]
    allowed: Sequence[Sequence[bool]]


@dataclass
class Violation(Exception):  # noqa: N818 - a violation is the finding, not an error of ours
    """The subject does not do what the property states; carries all that a reader needs.

    Attributes:
        headline: one sentence, specific to this input.
        got: value of the subject at the worst index, as text.
        expected: value that the property requires there, as text.
        index: worst index in the compared tensor.
        error: the measured error, in the unit of `tolerance`.
        unit: what one unit of the error is, in words; "" where the error is the difference itself.
        tolerance: the largest error that counts as rounding; 0 for exact claims.
        path: the way the subject was called (`mask=ones mode=no_grad`), if the property walks paths.
        influence: callable giving a T x T influence map; called once, on the smallest case.
        cause: callable giving the measured likely cause or None; called once, on the smallest case.
        asks: `(fact, value)`: where the fact is not declared this is a question, and that value its answer.
    """

    headline: str
    got: str = ""
    expected: str = ""
    index: tuple[int, ...] = ()
    error: float = float("nan")
    unit: str = ""
    tolerance: float = 0.0
    path: str = ""
    influence: Callable[[], InfluenceMap | None] | None = field(default=None, repr=False)
    cause: Callable[[], str | None] | None = field(default=None, repr=False)
    asks: tuple[str, Any] | None = None

    def __str__(self) -> str:
        return self.headline


class VacuousCheckError(Exception):
    """A comparison that cannot fail: no elements, constants only, or a tensor compared with itself."""


class NotSpokenOfError(BaseException):
    """The property turns out not to speak of this subject; says why. No `Exception`, so that no check catches it."""


class BudgetSpent(BaseException):
    """The time for this property is over; what was seen so far is the result."""

"""A recorded run as a straight-line program, and the lines of it that a judgement rests on."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

_WORD = re.compile(r"[^\W\d]\w*")
MODULE, MADE = "module", "made"
"""What a script calls the user's own instance, and the function that builds a model of drawn sizes."""


class UnwritableError(Exception):
    """Something that no line of source can stand for; says what."""


@dataclass
class Line:
    """One statement.

    Attributes:
        text: source; several lines of it where a statement needs some around it.
        makes: names that it defines or changes.
        needs: words in it, the names that it reads among them.
        is_call: whether it calls the subject.
    """

    text: str
    makes: tuple[str, ...]
    needs: frozenset[str]
    is_call: bool = False

    @classmethod
    def of(cls, text: str, makes: Iterable[str], *, is_call: bool = False) -> Line:
        """Return the line; what it needs is read off the text."""
        return cls(text, tuple(makes), words_in(text), is_call)


@dataclass
class Judged:
    """The comparison that failed.

    Attributes:
        kind: "close", "exact", "differs", "finite", "require" or "equal".
        got: expression for what the subject gave.
        expected: expression for what is required, or "".
        unit: size of one unit of error, as an expression.
        limit: largest error allowed, in units.
    """

    kind: str
    got: str
    expected: str = ""
    unit: str = "1.0"
    limit: float = 0.0


@dataclass
class Program:
    """A recorded run.

    Attributes:
        lines: statements in order.
        judged: the comparison that ended the run; None if it cannot be written down.
        parts: callables of the subject that are used ("forward", "weights", ...).
        pasted: functions of this package whose source the lines need, by name.
        models: that were built.
    """

    lines: list[Line] = field(default_factory=list)
    judged: Judged | None = None
    parts: dict[str, None] = field(default_factory=dict)
    pasted: dict[str, Callable[..., Any]] = field(default_factory=dict)
    models: list[Any] = field(default_factory=list)

    def needed(self, *, every_call: bool = False) -> list[Line] | None:
        """Return the lines that the judgement rests on; None if it does not rest on what the subject gave.

        Args:
            every_call: keep all calls of the subject, for one that may carry something on from call to call.
        """
        if self.judged is None or not self.judged.got:
            return None
        judged = words_in(f"{self.judged.got} {self.judged.expected} {self.judged.unit}")
        needed = self._behind(judged, ())
        if not any(line.is_call or {MODULE, MADE} & line.needs for line in needed):
            return None
        return self._behind(judged, [line for line in self.lines if line.is_call]) if every_call else needed

    def _behind(self, words: Iterable[str], calls: Sequence[Line]) -> list[Line]:
        """Return the lines that words rest on, and these calls, in order."""
        wanted = set(words)
        kept = []
        for line in reversed(self.lines):
            if wanted & set(line.makes) or line in calls:
                wanted |= line.needs
                kept.append(line)
        return kept[::-1]


def words_in(text: str) -> frozenset[str]:
    """Return the words of a piece of source.

    >>> sorted(words_in("y1 = forward(model, x2)[0]"))
    ['forward', 'model', 'x2', 'y1']
    """
    return frozenset(_WORD.findall(text))

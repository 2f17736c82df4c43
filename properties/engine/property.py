"""The property: one decorated function is one mathematical statement about one kind of subject.

To add a property, write one function with `@holds(...)` in the file of its family under
`veriformer/properties/families/`, or in a plug-in (see `extending`); nothing else registers it.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from veriformer.properties.subject.kinds import KINDS
from veriformer.properties.subject.subject import Subject

if TYPE_CHECKING:
    from veriformer.properties.engine.case import Case

LEVELS = ("core", "extended")
PREREQUISITES = ("numerics.finite", "numerics.stateless")
"""What must hold before any other property can be judged; checked by the engine's preflight."""

FARTHEST = 1025
"""Length up to which subjects are looked at that claim none: one past a power of two."""

_ID = re.compile(r"[a-z0-9_]+(-[a-z0-9_]+)*\.[a-z0-9]+(-[a-z0-9]+)*")
_REGISTRY: dict[str, Property] = {}


@dataclass(frozen=True)
class Property:
    """One property of the catalogue.

    Attributes:
        id: `family.slug`, stable for ever.
        statement: one true sentence.
        formula: the statement in symbols.
        source: where it comes from.
        kinds: kinds of subject it speaks about.
        level: "core" (a failure is a defect) or "extended" (follows from a declared convention).
        requires: ids that must hold first; if one fails, this one is BLOCKED.
        inapplicable: gives the reason why it does not apply to a subject, or None where it applies.
        sweeps_lengths: also cover, one by one, the lengths T that collide with another size.
        farthest: length up to which far ones are covered too; the longest of them alone where no lengths are swept.
        check: the check itself.
        examples_factor: multiplies the number of examples (below 1 for costly checks).
        catches: ids of documented bugs (the fault zoo) that it is meant to catch.
        copies: whether each case copies the whole model, so that few are judged where it is large.
        steps: whether a case may call once for each position, which is what a far length costs then.
        costly: whether it runs only in the profile thorough, or when it is named.
        rests_on: facts without which it does not apply.
        asks: `(fact, value)`: where the fact is not declared, a violation is a question, answered by that value.
        in_half: whether it is judged in bfloat16 and float16 too, of models that are not declared to be unfit for them.
        goes_wide: whether quick, too, sees a model of many heads: slopes are other ones where they are no power of two.
        goes_deep: whether quick, too, sees one of many layers besides, where no lengths are swept.
        leaves_open: facts it asks for and cannot tell from false ones: a count is the same with GELU and with ReLU.
    """

    id: str
    statement: str
    formula: str
    source: str
    kinds: tuple[str, ...]
    level: str
    requires: tuple[str, ...]
    inapplicable: Callable[[Subject], str | None]
    sweeps_lengths: bool
    check: Callable[[Case], None]
    farthest: int = 0
    examples_factor: float = 1.0
    catches: tuple[str, ...] = ()
    copies: bool = False
    steps: bool = False
    costly: bool = False
    rests_on: tuple[str, ...] = ()
    asks: tuple[str, Any] | None = None
    in_half: bool = False
    goes_wide: bool = False
    goes_deep: bool = False
    leaves_open: tuple[str, ...] = ()

    @property
    def told(self) -> dict[str, str]:
        """What it states, in words: for a report."""
        why = _clean(self.explanation)
        return {"statement": self.statement, "formula": self.formula, "source": self.source, "why": why}

    @property
    def goes_far(self) -> bool:
        """Whether it looks at sequences to the end of what a subject reaches."""
        return self.sweeps_lengths and self.farthest >= FARTHEST

    @property
    def family(self) -> str:
        """The part of the id before the dot."""
        return self.id.partition(".")[0]

    @property
    def explanation(self) -> str:
        """The docstring of the check: why the statement is true and when it does not apply."""
        return (self.check.__doc__ or "").strip()

    def why_not(self, subject: Subject) -> str | None:
        """Return why the property does not apply to `subject`, or None if it does."""
        if subject.kind not in self.kinds:
            return f"speaks of {', '.join(self.kinds)}, not of {subject.kind}"
        return self.inapplicable(subject)


def holds(
    id: str,  # noqa: A002 - the catalogue's word
    *,
    statement: str,
    formula: str,
    source: str,
    kinds: Iterable[str],
    level: str = "core",
    requires: Iterable[str] = (),
    unless: Callable[[Subject], str | None] | Sequence[Callable[[Subject], str | None]] = (),
    sweeps_lengths: bool = False,
    farthest: int | None = None,
    examples_factor: float = 1.0,
    catches: Iterable[str] = (),
    copies: bool = False,
    steps: bool = False,
    costly: bool = False,
    asks: tuple[str, Any] | None = None,
    in_half: bool = False,
    goes_wide: bool = False,
    goes_deep: bool = False,
    leaves_open: Iterable[str] = (),
) -> Callable[[Callable[[Case], None]], Callable[[Case], None]]:
    """Register the decorated check as the property `id`; arguments as the attributes of `Property`.

    Args:
        id: `family.slug`.
        statement: one true sentence ending in a full stop.
        formula: the statement in symbols.
        source: paper, section; or the derivation.
        kinds: keys of `KINDS`.
        level: "core" or "extended".
        requires: ids of properties that must hold first.
        unless: one or several functions of the subject that give the reason why the property does not apply, or None.
        sweeps_lengths: also cover, one by one, the lengths that collide with another size (`case.length()`).
        farthest: how far lengths are covered beyond the small ones, to the end where they are swept; 0 where a check
            costs more than a few forwards.
        examples_factor: multiplies the number of examples of the profile.
        catches: ids of documented bugs it is meant to catch.
        copies: whether each case copies the whole model.
        steps: whether a case may call once for each position.
        costly: run it only in the profile thorough, or when it is named.
        asks: `(fact, value)`: a violation is a question where the fact is not declared: is it by design?
        in_half: judge it in half precision too, where a violation asks for `half_precision`.
        goes_wide: in quick, too, judge it on a model of many heads.
        goes_deep: in quick, too, judge it on one of many layers besides: what takes every layer apart costs with them.
        leaves_open: facts that it asks for and that are not verified where it holds.

    Raises:
        ValueError: the id is malformed or taken, or a kind or level does not exist.
    """
    if not _ID.fullmatch(id):
        raise ValueError(f"property id {id!r} is malformed; write family.slug in lower case")
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        raise ValueError(f"{id}: there is no kind {unknown[0]!r}; the kinds are: {', '.join(KINDS)}")
    if level not in LEVELS:
        raise ValueError(f"{id}: level was {level!r}; it must be one of {', '.join(LEVELS)}")
    reasons = (unless,) if callable(unless) else tuple(unless)

    def inapplicable(subject: Subject) -> str | None:
        return next((why for reason in reasons if (why := reason(subject))), None)

    def register(check: Callable[[Case], None]) -> Callable[[Case], None]:
        known = _REGISTRY.get(id)
        if known is not None and _file_of(known.check) != _file_of(check):  # a file may be imported by two names
            raise ValueError(f"property id {id!r} is taken by {known.check.__module__}; choose another slug")
        _REGISTRY[id] = Property(
            id=id,
            statement=statement,
            formula=formula,
            source=source,
            kinds=tuple(kinds),
            level=level,
            requires=tuple(requires),
            inapplicable=inapplicable,
            sweeps_lengths=sweeps_lengths,
            farthest=(FARTHEST if sweeps_lengths else 0) if farthest is None else farthest,
            check=check,
            rests_on=tuple(r.rests_on for r in reasons if hasattr(r, "rests_on")),
            asks=asks,
            in_half=in_half,
            goes_wide=goes_wide,
            goes_deep=goes_deep,
            leaves_open=tuple(leaves_open),
            examples_factor=examples_factor,
            catches=tuple(catches),
            copies=copies,
            steps=steps,
            costly=costly,
        )
        return check

    return register


def _file_of(check: Callable[..., Any]) -> str:
    return os.path.realpath(check.__code__.co_filename)


def registered() -> Mapping[str, Property]:
    """Return the properties of the families that were imported so far, by id; see `judging.catalogue` for all."""
    return _REGISTRY


@cache
def _clean(explanation: str) -> str:
    return inspect.cleandoc(explanation)

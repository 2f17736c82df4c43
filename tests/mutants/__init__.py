"""The fault zoo: broken models, each with the defect that it stands for and the properties that must notice it.

To add a fault, add one function with `@fault(...)` to the file of its family in this folder.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass

from veriformer.properties.subject.subject import Subject
from veriformer.tests.mutants.documented import Bug, documented
from veriformer.tests.mutants.mending import mended


@dataclass(frozen=True)
class Fault:
    """One defect as a program.

    Attributes:
        id: of the documented bug (`CM01`, `CM01-sum` for a second form of it), or a slug for a systematic mutant.
        title: what is broken, in one sentence.
        citation: where the defect was found in released code; "" for a systematic mutant.
        killed_by: ids of the properties that must fail on it.
        cause: words of the right likely cause, alternatives parted by "|"; "" if no failure is expected to name one.
        subject: makes the broken subject.
    """

    id: str
    title: str
    citation: str
    killed_by: tuple[str, ...]
    cause: str
    subject: Callable[[], Subject]

    @property
    def bug(self) -> Bug | None:
        """The documented defect that it is a form of."""
        return documented().get(self.id.split("-")[0])

    @property
    def right(self) -> Subject | None:
        """The right subject that it was made from; None for a fault that does not say what it changes."""
        with mended() as left_out:
            subject = self.subject()
        return subject if left_out else None

    def names(self, cause: str) -> bool:
        """Whether a likely cause named in a failure is the right one."""
        return any(words in cause for words in self.cause.split("|")) if self.cause else False


FAULTS: dict[str, Fault] = {}


def fault(
    id: str,  # noqa: A002 - the catalogue's word
    title: str,
    *,
    killed_by: tuple[str, ...],
    citation: str = "",
    cause: str = "",
) -> Callable[[Callable[[], Subject]], Callable[[], Subject]]:
    """Register the decorated function as a fault; arguments as the attributes of `Fault`.

    Raises:
        ValueError: the id is taken.
    """

    def register(subject: Callable[[], Subject]) -> Callable[[], Subject]:
        known = FAULTS.get(id)
        if known is not None and not _is_again(known.subject, subject):
            raise ValueError(f"fault id {id!r} is taken by {known.subject.__module__}; choose another")
        bug = documented().get(id.split("-")[0])
        FAULTS[id] = Fault(id, title, bug.citation if bug else citation, killed_by, cause, subject)
        return subject

    return register


def _is_again(known: Callable[[], Subject], now: Callable[[], Subject]) -> bool:
    """Whether one function was registered twice, its file imported by two names."""
    places = {(one.__code__.co_filename, one.__qualname__) for one in (known, now)}
    return len(places) == 1 and known.__module__ != now.__module__


def all_faults() -> dict[str, Fault]:
    """Return every fault by id."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    return dict(sorted(FAULTS.items()))

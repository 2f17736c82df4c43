"""The fault zoo: broken models, each with the defect that it stands for and the properties that must notice it.

To add a fault, add one function with `@fault(...)` to the file of its family in this folder.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass

from veriformer.properties.subject import Subject


@dataclass(frozen=True)
class Fault:
    """One defect as a program.

    Attributes:
        id: of the documented bug (`CM01`), or a slug for a systematic mutant.
        title: what is broken, in one sentence.
        citation: where the defect was found in released code; "" for a systematic mutant.
        killed_by: ids of the properties that must fail on it.
        cause: words that the likely cause named in the failure must contain; "" if none is promised.
        subject: makes the broken subject.
    """

    id: str
    title: str
    citation: str
    killed_by: tuple[str, ...]
    cause: str
    subject: Callable[[], Subject]


FAULTS: dict[str, Fault] = {}


def fault(
    id: str,  # noqa: A002 - the catalogue's word
    title: str,
    *,
    killed_by: tuple[str, ...],
    citation: str = "",
    cause: str = "",
) -> Callable[[Callable[[], Subject]], Callable[[], Subject]]:
    """Register the decorated function as a fault; arguments as the attributes of `Fault`."""

    def register(subject: Callable[[], Subject]) -> Callable[[], Subject]:
        assert id not in FAULTS, f"fault {id} is registered twice"
        FAULTS[id] = Fault(id, title, citation, killed_by, cause, subject)
        return subject

    return register


def all_faults() -> dict[str, Fault]:
    """Return every fault by id."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    return dict(sorted(FAULTS.items()))

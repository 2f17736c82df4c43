"""Traps: implementations that are right and look wrong. Every property must pass them, or say why it does not apply.

To add a trap, add one function with `@trap(...)` to the file of its family in this folder.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass

from veriformer.properties.subject.subject import Subject


@dataclass(frozen=True)
class Trap:
    """One right implementation that looks wrong.

    Attributes:
        id: of the trap (`T05`), with a suffix where one trap has several forms.
        title: why it looks wrong.
        citation: who took it for wrong.
        subject: makes the subject, with its honest declarations.
    """

    id: str
    title: str
    citation: str
    subject: Callable[[], Subject]


TRAPS: dict[str, Trap] = {}


def trap(id: str, title: str, citation: str = "") -> Callable[[Callable[[], Subject]], Callable[[], Subject]]:  # noqa: A002
    """Register the decorated function as a trap; arguments as the attributes of `Trap`."""

    def register(subject: Callable[[], Subject]) -> Callable[[], Subject]:
        assert id not in TRAPS, f"trap {id} is registered twice"
        TRAPS[id] = Trap(id, title, citation, subject)
        return subject

    return register


def all_traps() -> dict[str, Trap]:
    """Return every trap by id."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    return dict(sorted(TRAPS.items()))

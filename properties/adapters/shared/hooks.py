"""Hooks that are there for a while: of modules, parameters, or anything else that hands out what removes them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol


class Handle(Protocol):
    """What registering a hook gives."""

    def remove(self) -> None:
        """Take the hook away."""


@contextmanager
def hooked(handles: Iterable[Handle]) -> Iterator[None]:
    """Run a block with these hooks, and take them away at its end, however it ends."""
    hooks = [*handles]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()

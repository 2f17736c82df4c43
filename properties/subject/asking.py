"""Which facts are asked for while a property is judged: those that no property asks for are believed, not verified."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

LENIENT = frozenset(
    {"batch_coupled", "quantised", "shared_layers", "sink_tokens", "max_len", "min_length", "equal_lengths"}
)
"""Facts that only take claims back: where they are asked for, nothing is held against them."""

_listening: list[set[str]] = []


@contextmanager
def facts_asked_for() -> Iterator[set[str]]:
    """Collect the names of the facts that are asked for while the block runs."""
    names: set[str] = set()
    _listening.append(names)
    try:
        yield names
    finally:
        _listening.pop()


def note(name: str) -> None:
    """Tell whoever collects that a fact was asked for."""
    for names in _listening:
        names.add(name)

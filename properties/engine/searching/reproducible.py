"""A seed gives the same draws wherever it runs: Hypothesis without the constants of the code around it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hypothesis.internal.cache import LRUCache
from hypothesis.internal.conjecture import providers as _providers

providers: Any = _providers  # its names are not for us: each is looked for before it is used
_NAMES = ("_get_local_constants", "CONSTANTS_CACHE")
_OURS: LRUCache[Any, Any] = LRUCache(1024)


@contextmanager
def alone() -> Iterator[None]:
    """Keep Hypothesis from drawing constants that it finds in the source of local modules, while the block runs.

    Since 6.131 one draw in twenty is a number that stands somewhere in the code of the user's modules, as far as they
    are imported by then. For us that means that cases depend on what else is imported, in which order, and on whether
    this package is installed or worked on; and that every process parses all of that code first. What Hypothesis had
    collected for the user's own tests is put back afterwards. Releases that know no such constants are left alone.
    """
    if not all(hasattr(providers, name) for name in (*_NAMES, "Constants")):
        yield
        return
    kept = {name: getattr(providers, name) for name in _NAMES}
    none = providers.Constants()
    setattr(providers, _NAMES[0], lambda: none)
    setattr(providers, _NAMES[1], _OURS)
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(providers, name, value)

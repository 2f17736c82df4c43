"""A seed gives the same draws wherever it runs: Hypothesis without the constants of the code around it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
from hypothesis import control as _control
from hypothesis import core as _core
from hypothesis.internal.cache import LRUCache
from hypothesis.internal.conjecture import providers as _providers

control: Any = _control
core: Any = _core  # its names are not for us: each is looked for before it is used
providers: Any = _providers
_NAMES = ("_get_local_constants", "CONSTANTS_CACHE")
_SEEDS = "deterministic_PRNG"
_WARNS = "deprecate_random_in_strategy"
_OURS: LRUCache[Any, Any] = LRUCache(1024)


@contextmanager
def _seeded(seed: int = 0) -> Iterator[None]:
    """Seed Python's and NumPy's generators, as Hypothesis does before every example, without keeping their states.

    `isolated` keeps them, once for all examples of a property: to copy 2500 bytes each way for every example took a
    third of what Hypothesis takes.
    """
    random.seed(seed)
    np.random.seed(seed)
    yield


@contextmanager
def alone() -> Iterator[None]:
    """Keep Hypothesis from drawing constants that it finds in the source of local modules, while the block runs.

    Since 6.131 one draw in twenty is a number that stands somewhere in the code of the user's modules, as far as they
    are imported by then. For us that means that cases depend on what else is imported, in which order, and on whether
    this package is installed or worked on; and that every process parses all of that code first. What Hypothesis had
    collected for the user's own tests is put back afterwards. Releases that know no such constants are left alone.
    Python's and NumPy's generators are seeded before every example, and are not what they were when the block ends.
    """
    ours: list[tuple[Any, str, Any]] = [(core, _SEEDS, _seeded)] if hasattr(core, _SEEDS) else []
    if hasattr(control, _WARNS):  # it compares the state of Python's generator before and after `st.data()`
        ours.append((control, _WARNS, lambda *words: nullcontext()))
    if all(hasattr(providers, name) for name in (*_NAMES, "Constants")):
        none = providers.Constants()
        ours += [(providers, _NAMES[0], lambda: none), (providers, _NAMES[1], _OURS)]
    kept = [(owner, name, getattr(owner, name)) for owner, name, _ in ours]
    for owner, name, value in ours:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in kept:
            setattr(owner, name, value)

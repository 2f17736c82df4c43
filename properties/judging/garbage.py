"""How often a process that is somebody else's looks for garbage while a model is judged in it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_SELDOM = (20_000, 20, 20)
"""Objects, and rounds of the younger generations, before a generation is looked through: as in processes of our own."""


@contextmanager
def collecting_seldom() -> Iterator[None]:
    """Look seldom for garbage inside, and as before afterwards.

    Calls of models make tuples and views by the thousand and no cycles, and one look through all that torch and
    Hypothesis have imported takes as long as the check of a softmax.
    """
    before = gc.get_threshold()
    gc.set_threshold(*_SELDOM)
    try:
        yield
    finally:
        gc.set_threshold(*before)

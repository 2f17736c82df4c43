"""Memory of a process that judges or trains: what it frees is kept, and what cannot be garbage is not looked at."""

from __future__ import annotations

import ctypes
import gc
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT = 2**29
"""Half a GiB, as in the trainers of `ablations`: the tensors of a forward of a thousand tokens many times over."""

_APART = 2**25
"""32 MiB, the most that every glibc takes: larger blocks are the system's own, and go back when they are freed."""


def keep_freed_memory() -> None:
    """Let this process keep what it frees, up to half a GiB; nothing where the allocator is not glibc's.

    A forward of a long sequence makes a dozen tensors of some megabytes and frees them. Handed back each time, every
    page of them is asked for, and cleared by the system, anew: a fifth of the time of a check of such lengths.
    """
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and mallopt(_M_MMAP_THRESHOLD, _APART):  # else the other one would fix it at 128 KiB
        mallopt(_M_TRIM_THRESHOLD, _KEPT)


def seldom_collect() -> None:
    """Look no more for garbage among what this process has imported, and seldom elsewhere.

    Calls of models make tuples and views by the thousand and no cycles: looking through torch's modules after every
    700 of them is a twentieth of the time of a check.
    """
    freeze()
    gc.set_threshold(20_000, 20, 20)


def freeze() -> None:
    """Drop the garbage there is, and look no more at what is left: copies of this process share its memory then."""
    gc.collect()
    gc.freeze()

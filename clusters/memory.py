"""Memory that a process frees and will want again a moment later: kept, rather than handed back to the system."""

from __future__ import annotations

import ctypes
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

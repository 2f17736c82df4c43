"""Limits of one process."""

from __future__ import annotations

import contextlib


def limit_memory(gib: float) -> None:
    """Limit the address space of this process; 0 for no limit."""
    if gib <= 0:
        return
    try:
        import resource
    except ImportError:  # not a Unix system: no limit
        return
    limit = int(gib * 2**30)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))

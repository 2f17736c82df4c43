"""All that a process started, its children's children and daemons too: how much it takes, and how it is ended.

A process that calls itself their nurse (`nursing`) is told of by the system as the parent of every orphan below it, so
that none leaves its sight. Only Linux says so much; elsewhere nothing is seen here, and groups of processes are ended.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from veriformer.cli.processes.limits import Limits

_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


def children(process: int) -> list[int]:
    """Return the ids of the children of a process, in no order."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{process}/task"):
            with contextlib.suppress(OSError):
                found += map(int, Path(f"/proc/{process}/task/{thread}/children").read_bytes().split())
    return found


def below(process: int) -> list[int]:
    """Return the ids of all descendants, nearest first; those that ended and were not waited for are among them."""
    found: list[int] = []
    level = [process]
    while level:
        level = [child for parent in level for child in children(parent) if child not in found]
        found += level
    return found


def excess(limits: Limits, process: int) -> int:
    """Return what `Limits.exceeded` says of the descendants of a process."""
    there = below(process)
    memory = sum(map(_own_memory, there))
    if memory > limits.memory_gib * 2**30 > 0:  # copies share pages: counted once, which takes longer
        memory = sum(map(_share_of_memory, there))
    return limits.exceeded(len(there), memory, sum(map(_written, there)))


def end_below(process: int) -> None:
    """End all descendants of a process: first stopped, so that none starts another while the others are ended."""
    stopped: set[int] = set()
    while fresh := [pid for pid in below(process) if pid not in stopped]:
        stopped |= {*fresh}
        for pid in fresh:
            _send(pid, signal.SIGSTOP)
    for pid in stopped:
        _send(pid, signal.SIGKILL)


def _own_memory(process: int) -> int:
    """Return the bytes of memory that are no file's, copies of a process counted as if they shared nothing."""
    try:
        _, resident, shared, *_ = map(int, Path(f"/proc/{process}/statm").read_bytes().split())
    except (OSError, ValueError):
        return 0
    return (resident - shared) * _PAGE


def _share_of_memory(process: int) -> int:
    return _told(f"/proc/{process}/smaps_rollup", b"Pss:") * 2**10


def _written(process: int) -> int:
    return _told(f"/proc/{process}/io", b"wchar:")


def _told(file: str, word: bytes) -> int:
    try:
        lines = Path(file).read_bytes().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(word)), 0)


def _send(process: int, what: int) -> None:
    with contextlib.suppress(OSError):
        os.kill(process, what)

"""Questions that somebody's own code answers, asked in a copy of this process: what it does there harms no run."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from veriformer.clusters.copies import copied

Answer = TypeVar("Answer")
_LOOK = 0.2  # seconds between two looks at whether the copy is still there
STILL = 60.0
"""Seconds after which a copy that uses no processor is given up: it waits for a thread that was not copied with it."""


def asked_apart(ask: Callable[[], Answer], otherwise: Answer) -> Answer:
    """Return what a function returns in a copy of this process; what it prints there is dropped.

    The code was heard when it was trained; here it is only counted and compared. A copy has the study as it was loaded,
    which a new process would import again for each question; of the threads it has one, so that it is given up where it
    stands still. Where there is no fork it is asked in this process.

    Args:
        ask: returns what JSON has.
        otherwise: the answer where the copy raised, stood still, or ended in whatever way.
    """
    if not hasattr(os, "fork"):
        try:
            return ask()
        except Exception:
            return otherwise
    inner, outer = os.pipe()
    child = copied()
    if not child:
        _answer(ask, outer)
    os.close(outer)
    try:
        told = _heard(inner, child)
    finally:
        os.close(inner)
        with contextlib.suppress(OSError):
            os.killpg(child, signal.SIGKILL)
        with contextlib.suppress(OSError):
            os.kill(child, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child, 0)
    try:
        found: Answer = json.loads(told)["answer"]
    except (ValueError, KeyError, TypeError):
        return otherwise
    return found


def _answer(ask: Callable[[], Any], outer: int) -> None:
    """Be the copy: answer and end, whatever happens."""
    own = os.getpid()
    try:
        os.setpgid(0, 0)  # signals to its group are its own
        nowhere = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(nowhere, number)
        sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        torch.set_num_threads(1)  # the threads of the other process are not there
        told = json.dumps({"answer": ask()}).encode() + b"\n"
        if os.getpid() == own:
            os.write(outer, told)
    finally:
        os._exit(0)


def _heard(inner: int, child: int) -> bytes:
    """Return the line that the copy writes; what it started may hold the pipe open longer than it lives."""
    told, is_there = b"", True
    used, since = -1.0, time.monotonic()
    while not told.endswith(b"\n"):
        if not select.select([inner], [], [], _LOOK if is_there else 0)[0]:
            if not is_there:
                break
            if (now := _used(child)) != used:
                used, since = now, time.monotonic()
            elif time.monotonic() - since > STILL:
                break
            with contextlib.suppress(ChildProcessError):
                is_there = not os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            continue
        part = os.read(inner, 2**16)
        if not part:
            break
        told += part
    return told


def _used(child: int) -> float:
    """Return the processor seconds of a process; what always differs where the system does not tell."""
    try:
        return time.clock_gettime(~child << 3 | 2)  # the clock of a process, see clock_getcpuclockid of glibc
    except OSError:
        return time.monotonic()

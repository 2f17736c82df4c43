"""Which jobs Slurm has in its queue: asked of `squeue`, since accounts (`sacct`) are kept by some Slurms alone."""

from __future__ import annotations

import subprocess
import threading
import time

_ASKED_EVERY = 10.0
"""Seconds between two questions to the controller, for all jobs together: it asks to be left in peace."""

_ASKED_FOR = 20.0
"""Seconds for it to answer."""


class Queue:
    """The jobs that this user has waiting or running, as the controller told last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked = float("-inf")
        self._answers = 0
        self._there: frozenset[str] = frozenset()
        self._missed: dict[str, int] = {}

    def has_lost(self, job: str) -> bool:
        """Return whether a job that was submitted has left the queue, by two answers one after another.

        Two, since a job may be asked for in the moment in which it goes from one state to the next; never where the
        controller does not answer: nothing is known then.
        """
        with self._lock:
            self._ask()
            if job in self._there:
                self._missed.pop(job, None)
                return False
            first = self._missed.setdefault(job, self._answers)
            return self._answers - first >= 2

    def _ask(self) -> None:
        if time.monotonic() - self._asked < _ASKED_EVERY:
            return
        self._asked = time.monotonic()
        try:
            told = subprocess.run(
                ["squeue", "--me", "--noheader", "--format=%A"],
                capture_output=True, text=True, check=True, timeout=_ASKED_FOR,
            ).stdout  # fmt: skip
        except (OSError, subprocess.SubprocessError):
            return
        self._there = frozenset(told.split())
        self._answers += 1

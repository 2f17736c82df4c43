"""What falls to the process that asks: what a subject leaves behind that killed its nurse."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from multiprocessing import forkserver, resource_tracker
from typing import Any

from veriformer.cli.processes.nursing import ADOPTS, control
from veriformer.cli.processes.watching import children, end_below


class Orphans:
    """The parent of last resort, from now on until it is closed; on Linux, elsewhere there is none.

    A nurse adopts what loses its parent below it (see `nursing`). A subject may kill its nurse: then this process, the
    next one above that adopts, gets what is left, and ends it.
    """

    def __init__(self) -> None:
        self._known = set(children(os.getpid()))
        control(ADOPTS, 1)

    def end(self) -> None:
        """End every child that this process did not start, and all below it."""
        servant: Any = forkserver._forkserver
        tracker: Any = resource_tracker._resource_tracker
        own = {servant._forkserver_pid, tracker._pid, *(p.pid for p in multiprocessing.active_children())}
        for pid in set(children(os.getpid())) - self._known - own:
            end_below(pid)
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)

    def close(self) -> None:
        """End what there is, and adopt no more."""
        self.end()
        control(ADOPTS, 0)

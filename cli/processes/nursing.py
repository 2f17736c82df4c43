"""How a process that runs somebody's code is kept: its outputs, its group, and what it leaves behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import stat
import sys
from collections.abc import Callable, Sequence
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

_DIES_WITH_PARENT, _ADOPTS = 1, 36  # PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER of <linux/prctl.h>


def nursed(work: Callable[[], None], keep: Sequence[HasFileno]) -> None:
    """Do the work in a child of this process, which ends as the child ends and takes along what that left behind.

    So the template has no child that could harm it, and no process of a subject outlives its judgement: orphans become
    children of this one (on Linux) and are ended with it, also those that left the group. Where there is no fork the
    work is done here.

    Args:
        work: returns, or ends its process in whatever way.
        keep: the connections of the child; all others that this process has are closed.
    """
    if not hasattr(os, "fork"):
        work()
        return
    os.setsid()
    _forget_connections([end.fileno() for end in keep])
    _control(_ADOPTS, 1)
    _control(_DIES_WITH_PARENT, signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda *_: _end_with(os.EX_TEMPFAIL))
    child = os.fork()
    if not child:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _control(_DIES_WITH_PARENT, signal.SIGKILL)
        work()
        return
    for end in keep:
        end.close()
    ended, status = 0, 0
    while ended != child:
        ended, status = os.wait()
    code = os.waitstatus_to_exitcode(status)
    _clear()
    if code >= 0:
        os._exit(code)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
    os._exit(128 - code)  # the signal was ignored


def _forget_connections(keep: Sequence[int]) -> None:
    """Close all pipes and sockets but these: what is written to those of the template ends it.

    The template also lives as long as somebody can ask it for processes: that is its parent alone from now on. Where
    somebody's code starts processes by multiprocessing, it gets a template of its own.
    """
    for number in [int(name) for name in os.listdir("/dev/fd")]:
        with contextlib.suppress(OSError):
            mode = os.fstat(number).st_mode
            if number > 2 and number not in keep and (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
                os.close(number)
    servant: Any = forkserver._forkserver
    servant._forkserver_address = servant._forkserver_alive_fd = servant._forkserver_pid = None
    servant._inherited_fds = None
    tracker: Any = resource_tracker._resource_tracker
    tracker._fd = tracker._pid = None


class HasFileno(Protocol):
    """A connection."""

    def fileno(self) -> int:
        """Return its descriptor."""

    def close(self) -> None:
        """Close it."""


def captured(output: Connection) -> Callable[[], None]:
    """Send there what is written to descriptors 1 and 2, from Python or from C; returns what empties the buffers."""
    if sys.platform == "win32":
        sys.stdout = sys.stderr
        return lambda: None
    for descriptor in (1, 2):
        os.dup2(output.fileno(), descriptor)
    output.close()
    streams = [os.fdopen(d, "w", 1, "utf-8", "backslashreplace", closefd=False) for d in (1, 2)]
    sys.stdout, sys.stderr = streams
    flush_c = getattr(ctypes.CDLL(None), "fflush", None)

    def flush() -> None:
        for stream in streams:
            with contextlib.suppress(Exception):
                stream.flush()
        if flush_c is not None:
            flush_c(None)

    return flush


def expendable() -> None:
    """Let the system end this process first when memory runs out, and leave no image of it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    if sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _control(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _clear() -> None:
    """End all children, and theirs, which are ours then."""
    while True:
        for pid in _children():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.wait()
        except ChildProcessError:
            return


def _children() -> list[int]:
    try:
        told = Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="ascii")
    except OSError:
        return []
    return [int(word) for word in told.split()]


def _end_with(code: int) -> None:
    _clear()
    os._exit(code)

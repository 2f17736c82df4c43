"""How a process that runs somebody's code is kept: its outputs, its group, and what it leaves behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import stat
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from veriformer.cli.processes.limits import Limits
from veriformer.cli.processes.watching import end_below, excess
from veriformer.cli.processes.wire import NoAnswerError, Wire
from veriformer.clusters.copies import copied

_DIES_WITH_PARENT, ADOPTS = 1, 36  # PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER of <linux/prctl.h>
_HEARD = tuple(getattr(signal, name) for name in ("SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGALRM")
               if hasattr(signal, name))  # fmt: skip
"""Signals that end a process which does not expect them; none is for a nurse. Its parent ends it by SIGTERM."""

_LOOK = 0.05  # seconds between two looks at what a child takes


def nursed(work: Callable[[], None], keep: Sequence[HasFileno], guard: Guard) -> None:
    """Do the work in a child of this process, which ends as the child ends and takes along what that left behind.

    So the template has no child that could harm it, and no process of a subject outlives its judgement: orphans become
    children of this one (on Linux) and are ended with it, also those that left the group. Where there is no fork the
    work is done here.

    Args:
        work: returns, or ends its process in whatever way.
        keep: the connections of the child; all others that this process has are closed.
        guard: what the child and all that it starts may take.
    """
    if not hasattr(os, "fork"):
        work()
        return
    _take_charge(keep)
    child = copied()
    if not child:
        _let_go()
        work()
        return
    for end in keep:
        end.close()
    while (code := _ended(child)) is None:
        guard.look()
        time.sleep(_LOOK)
    _clear()
    _end_as(code)


def nursed_each(
    work: Callable[[Wire, Any], None], wire: Wire, keep: Sequence[HasFileno], guard: Guard, prepare: Callable[[], None]
) -> None:
    """Do each piece of work in a child of its own, a copy of what this process is after it has prepared itself.

    A child knows the connection to this process alone, and is ended with all that it left behind before its answer is
    passed on: the next one meets nothing of it. A child that gives no answer ends this process as it ended.

    Args:
        work: gets a connection and what came over `wire`; sends one answer.
        wire: over which the pieces of work come.
        keep: the connections of this process; all others are closed.
        guard: what a child and all that it starts may take.
        prepare: imports what every child needs.
    """
    if hasattr(os, "fork"):
        _take_charge(keep)
    prepare()
    while True:
        question = wire.receive()
        if not hasattr(os, "fork"):
            work(wire, question)
            continue
        ours, theirs = socket.socketpair()
        child = copied()
        if not child:
            _let_go()
            wire.close()
            ours.close()
            work(Wire(theirs), question)
            os._exit(0)
        theirs.close()
        _pass_on(Wire(ours), wire, child, guard)
        ours.close()


def _pass_on(inner: Wire, outer: Wire, child: int, guard: Guard) -> None:
    """Wait for the answer of a child, end it, and send the answer; what is none is sent as an empty line."""
    code: int | None = None
    while True:
        try:
            if (answer := inner.take()) is not None:
                break
        except EOFError:
            code = _ended(child) if code is None else code
            if code is None:  # it closed its end; what is left of it is ended by its limit
                time.sleep(_LOOK)
        except NoAnswerError:
            answer = None
            break
        if code is not None:
            _clear()
            _end_as(code)
        code = _ended(child)
        guard.look()
        select.select([inner.end], [], [], _LOOK)
    _clear()
    if answer is None:
        outer.end.sendall(b"\n")
    else:
        outer.send(answer)


@dataclass(frozen=True)
class Guard:
    """Looks after what a child of this process takes, and ends this one with all below it where that is too much.

    Attributes:
        limits: of the child.
        tell: called with the number of the sentence that says what was too much.
    """

    limits: Limits
    tell: Callable[[int], None]

    def look(self) -> None:
        """End this process if its descendants take too much."""
        if number := excess(self.limits, os.getpid()):
            self.tell(number)
            _clear()
            self.tell(number)  # where what was ended wrote there too
            os._exit(os.EX_TEMPFAIL)


def _take_charge(keep: Sequence[HasFileno]) -> None:
    """Become the leader of a session, to which every orphan below falls, and which only its parent ends."""
    os.setsid()
    for number in _HEARD:
        signal.signal(number, signal.SIG_IGN)
    _forget_connections([end.fileno() for end in keep])
    control(ADOPTS, 1)
    control(_DIES_WITH_PARENT, signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda *_: _end_with(os.EX_TEMPFAIL))


def _let_go() -> None:
    """Be a child again, that ends when its nurse does; what it sends to its group reaches what it started alone."""
    os.setpgid(0, 0)
    for number in (*_HEARD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    control(_DIES_WITH_PARENT, signal.SIGKILL)


def _ended(child: int) -> int | None:
    """Return how a child ended, None if it did not; orphans that ended are waited for too."""
    ended = -1
    with contextlib.suppress(ChildProcessError):
        while ended:
            ended, status = os.waitpid(-1, os.WNOHANG)
            if ended == child:
                return os.waitstatus_to_exitcode(status)
    return None


def _end_as(code: int) -> None:
    """End this process in the way in which a child ended."""
    if code >= 0:
        os._exit(code)
    with contextlib.suppress(OSError):  # nobody handles SIGKILL
        signal.signal(-code, signal.SIG_DFL)
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

    def flush() -> None:
        for stream in streams:
            with contextlib.suppress(Exception):
                stream.flush()
        flush_c()

    return flush


def flush_c() -> None:
    """Write what C holds back of its outputs."""
    if sys.platform != "win32" and (flush := getattr(ctypes.CDLL(None), "fflush", None)) is not None:
        flush(None)


def expendable() -> None:
    """Let the system end this process first when memory runs out, and leave no image of it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    if sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def control(option: int, value: int) -> None:
    """Tell the system how this process is to be treated; where there is no such word nothing happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _clear() -> None:
    """End all descendants; those whose parents ended before them are children of this process then."""
    while True:
        end_below(os.getpid())
        try:
            os.wait()
        except ChildProcessError:
            return


def _end_with(code: int) -> None:
    _clear()
    os._exit(code)

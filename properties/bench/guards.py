"""Calls of somebody's code: limited in time, warnings kept quiet, whatever it raises told in one sentence."""

from __future__ import annotations

import errno
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from threading import current_thread, main_thread
from time import perf_counter, thread_time  # bound here: what is judged may put something else into the module
from typing import Any

import torch
from torch import Tensor

from veriformer.properties.adapters.shadows import shadow
from veriformer.properties.bench.isolation import flags, put_back
from veriformer.properties.results.clocks import OURS, PULSE, counted
from veriformer.properties.subject.raised import printable, told

if sys.platform != "win32":
    import resource

_OURS = ("veriformer.", "hypothesis.")
_NEUTRAL = ("torch", "numpy", "scipy", "hypothesis", "importlib", "pluggy", "_pytest")
_TRUSTED = {
    (owner, name): getattr(owner, name)
    for owner, names in (
        (Tensor, "__add__ __sub__ __mul__ __truediv__ __getitem__ abs max all any equal isfinite clone to double"),
        (torch, "equal isfinite allclose randn randint tensor zeros ones arange cat stack where no_grad"),
    )
    for name in names.split()
}
"""What every judgement is computed with."""


class SubjectError(Exception):
    """The subject raised, or returned something that its kind does not allow; says which in one sentence."""


class SizesRefusedError(SubjectError):
    """`build` says no to drawn sizes, and not to the smallest ones: heads of two channels, say, it need not have."""


class NoRoomError(SubjectError):
    """What is to be done takes more memory than there is; says how much, and how much is free."""


class WrongOutputError(SubjectError):
    """The subject came back with what is no tensor of numbers."""


class SubjectTimeoutError(BaseException):
    """One call of the subject took longer than the limit. A BaseException, so that no search catches it."""


_inside = [0.0]
"""Seconds that this process has been in somebody's code; a call inside of a call is counted once."""

_HAS_TIMER = hasattr(signal, "setitimer")
_ALARM, _REAL = (int(signal.SIGALRM), int(signal.ITIMER_REAL)) if _HAS_TIMER else (0, 0)
_handle: Callable[..., Any] = getattr(sys.modules.get("_signal"), "signal", signal.signal)
"""What `signal.signal` calls; the rest of it finds names for numbers, for ten times as long."""

_WAITING = 40.0
"""Seconds that a subject which waits may take beside what is granted; a busy machine where it tells of no waiting."""


class Allowance:
    """An amount of work, in seconds of this thread's processor: a busy machine does not use it up.

    Args:
        seconds: of the processor; of seconds that count (see `counted`) 40 more at most, for what waits uses none.
    """

    def __init__(self, seconds: float) -> None:
        self._until = thread_time() + seconds
        self._clock = counted() + seconds + _WAITING

    @property
    def is_spent(self) -> bool:
        """Whether it is used up."""
        if thread_time() > self._until:
            return True
        return perf_counter() > self._clock and counted() > self._clock  # what counts is no more, and takes a file


def guarded(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], seconds: float) -> Any:
    """Return `function(*args, **kwargs)`; torch's global flags are as before afterwards.

    Raises:
        SubjectError: it raised (or asked Python to exit); says what, where it was called and with which shapes.
        SubjectTimeoutError: it took longer than `seconds`.
    """
    try:
        return limited(function, args, kwargs, seconds)
    except (MemoryError, RecursionError) as problem:
        raise SubjectError(f"the subject raised {type(problem).__name__} ({_describe(args, kwargs)})") from problem
    except BaseException as problem:
        if not is_its_own(problem):
            raise
        said = f"the subject raised {told(problem)} ({_describe(args, kwargs)}){last_frames(problem, '; ')}"
        if hidden := shadow(problem):
            said += f"; {hidden}"
        raise SubjectError(said) from problem


def limited(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], seconds: float) -> Any:
    """Return `function(*args, **kwargs)`, whatever it raises; else as `guarded`.

    Raises:
        SubjectTimeoutError: it took longer than `seconds`.
    """
    before, kept = PULSE.begin(seconds), flags()
    try:
        with _TimeLimit(seconds), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            started = perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                if before[0] == OURS:  # the outermost of calls in calls
                    _inside[0] += perf_counter() - started
                if flags() != kept:
                    put_back(kept)
    except SubjectTimeoutError:
        PULSE.hung()
        raise
    finally:
        PULSE.end(before)


def seconds_inside() -> float:
    """Return how long this process has been in somebody's code: in forwards, builds and other parts of subjects."""
    return _inside[0]


def is_its_own(problem: BaseException) -> bool:
    """Whether an exception is one that somebody's code raises, rather than one by which the engine ends a case.

    Ctrl-C is the user's own, except in a process that another one watches: there nobody presses keys.
    """
    if isinstance(problem, KeyboardInterrupt):
        return PULSE.is_watched
    return isinstance(problem, Exception) or not f"{type(problem).__module__}.".startswith(_OURS)


def insist_on_room(needed: int, device: torch.device, what: str) -> None:
    """Refuse what would not fit, before the machine begins to swap or ends the process.

    Args:
        needed: bytes.
        device: where they are taken.
        what: takes them, for the message.

    Raises:
        NoRoomError: less is free. Where nothing tells how much is, nothing is refused.
    """
    if not has_room(needed, device):
        free = _free(device) or 0
        raise NoRoomError(f"{what} takes {needed / 2**30:.1f} GiB of memory, and {free / 2**30:.1f} GiB are free")


def has_room(needed: int, device: torch.device) -> bool:
    """Whether so many bytes are free on a device, as far as it tells."""
    free = _free(device)
    return free is None or needed <= free


def _free(device: torch.device) -> int | None:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else _free_on_the_cpu()


def _free_on_the_cpu() -> int | None:
    """Return the bytes that this process can take without swapping: of the machine, and of the limit set for it."""
    if sys.platform == "win32":
        return None
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        free = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):  # no Linux
        return None
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return free if limit == resource.RLIM_INFINITY else min(free, limit - taken)


def whose_fault(problem: BaseException) -> str | None:
    """Say what of the user's code an exception comes from that was raised in ours; None if it is our own mistake."""
    for frame in reversed(_frames_of_users(problem)):
        return f"{Path(frame.filename).name}, line {frame.lineno}"
    if sys.modules.get("sys") is not sys:
        return "it took modules out of sys.modules"
    for (owner, name), right in _TRUSTED.items():
        if getattr(owner, name, None) is not right:
            return f"it replaced {'torch' if owner is torch else 'torch.Tensor'}.{name}, which judges what it gives"
    return _used_up(problem)


def _used_up(problem: BaseException) -> str | None:
    """Say what the process has no more of, which whatever runs there meets next; None if it is something else."""
    if isinstance(problem, MemoryError):
        return "its process has no memory left"
    if isinstance(problem, OSError) and problem.errno in (errno.EMFILE, errno.ENFILE):
        return "its process has too many files open"
    if isinstance(problem, OSError) and problem.errno in (errno.ENOSPC, errno.EFBIG):
        return "there is no room for what it writes"
    return None


def last_frames(problem: BaseException, between: str = "\n    ", most: int = 3) -> str:
    """Return the last lines of the user's own code that an exception, or what caused it, came through.

    One line each (in the reason of a row all are one line), the innermost last, with the line of the file; empty where
    none of it is the user's.
    """
    chain = [problem]
    while (cause := chain[-1].__cause__) is not None and len(chain) < 8:
        chain.append(cause)
    frames = next((found for one in reversed(chain) if (found := _frames_of_users(one))), [])
    return "".join(
        f"{between}{Path(f.filename).name}, line {f.lineno}, in {f.name}: {printable((f.line or '').strip()[:100])}"
        for f in frames[-most:]
    )


def _frames_of_users(problem: BaseException) -> list[traceback.FrameSummary]:
    """Return the frames of an exception that are neither ours, nor torch's, nor the standard library's."""
    ours, libraries = str(Path(__file__).resolve().parents[2]), (sys.prefix, sys.base_prefix)
    tests = str(Path(ours) / "tests")
    found = []
    for frame in traceback.extract_tb(problem.__traceback__):
        file = str(Path(frame.filename).resolve()) if not frame.filename.startswith("<") else ""
        parts = Path(file).parts
        is_library = file.startswith(libraries) and "site-packages" not in parts
        is_ours = file.startswith(ours) and not file.startswith(tests)
        if file and not is_ours and not is_library and not set(parts) & set(_NEUTRAL):
            found.append(frame)
    return found


def _describe(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    shapes = [f"{list(a.shape)} {str(a.dtype).removeprefix('torch.')}" for a in args if isinstance(a, Tensor)]
    shapes += [f"{k}={list(v.shape)}" for k, v in kwargs.items() if isinstance(v, Tensor)]
    return "called with " + ", ".join(shapes) if shapes else "called without tensors"


_last = [float("-inf"), 0.0]
_STALE = 0.05  # seconds for which a reading of the clock serves: it is a file, and calls are many


def _waiting() -> float:
    """Return how long this process had waited for others, read a moment ago."""
    now = perf_counter()
    if now - _last[0] > _STALE:
        _last[:] = now, now - counted()
    return _last[1]


class _TimeLimit:
    """Raise SubjectTimeoutError when the block runs longer; needs the main thread of a Unix process, else no limit.

    Only seconds that count do (see `counted`), and what torch imports of itself on the way starts the clock anew. A
    hang inside a C extension, or where exceptions are swallowed, is not ended by this: on the command line the process
    that waits for the answer keeps the limit, too.

    Args:
        seconds: of one block; 0 or less: no limit.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._holds = seconds > 0 and _HAS_TIMER and current_thread() is main_thread()

    def __enter__(self) -> None:
        if not self._holds:
            return
        self._began, self._imported = perf_counter() - _waiting(), len(sys.modules)
        self._before = _handle(_ALARM, self._stop)
        self._remaining, self._interval = signal.setitimer(_REAL, self._seconds)
        self._started = perf_counter()

    def __exit__(self, *raised: object) -> None:
        if not self._holds:
            return
        signal.setitimer(_REAL, 0)
        _handle(_ALARM, self._before)
        if self._remaining:
            left = max(self._remaining - (perf_counter() - self._started), 1e-3)
            signal.setitimer(_REAL, left, self._interval)

    def _stop(self, signum: int, frame: object) -> None:
        if len(sys.modules) != self._imported:
            self._began, self._imported = counted(), len(sys.modules)
            PULSE.restart()
        if (left := self._seconds - (counted() - self._began)) > 0:
            signal.setitimer(_REAL, max(left, 1e-3))
            return
        raise SubjectTimeoutError(f"one call of the subject took longer than {self._seconds:g} s")

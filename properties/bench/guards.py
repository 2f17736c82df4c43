"""Calls of somebody's code: limited in time, warnings kept quiet, whatever it raises told in one sentence."""

from __future__ import annotations

import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

if sys.platform != "win32":
    import resource


class SubjectError(Exception):
    """The subject raised, or returned something that its kind does not allow; says which in one sentence."""


class NoRoomError(SubjectError):
    """What is to be done takes more memory than there is; says how much, and how much is free."""


class SubjectTimeoutError(BaseException):
    """One call of the subject took longer than the limit. A BaseException, so that no search catches it."""


_WAITING = 40.0
"""Seconds that a busy machine, or a subject that waits, may take beside what is granted."""


class Allowance:
    """An amount of work, in seconds of this thread's processor: a busy machine does not use it up.

    Args:
        seconds: of the processor; by the clock it is spent 40 s later at the latest, for what waits uses none.
    """

    def __init__(self, seconds: float) -> None:
        self._until = time.thread_time() + seconds
        self._clock = time.perf_counter() + seconds + _WAITING

    @property
    def is_spent(self) -> bool:
        """Whether it is used up."""
        return time.thread_time() > self._until or time.perf_counter() > self._clock


def guarded(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], seconds: float) -> Any:
    """Return `function(*args, **kwargs)`.

    Raises:
        SubjectError: it raised; says what, where it was called and with which shapes.
        SubjectTimeoutError: it took longer than `seconds`.
    """
    try:
        with _time_limit(seconds), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return function(*args, **kwargs)
    except (MemoryError, RecursionError) as problem:
        raise SubjectError(f"the subject raised {type(problem).__name__} ({_describe(args, kwargs)})") from problem
    except Exception as problem:
        raise SubjectError(
            f"the subject raised {type(problem).__name__}: {first_line(problem)} ({_describe(args, kwargs)})"
        ) from problem


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


def first_line(problem: BaseException) -> str:
    """Return the first line of what an exception says, cut to 300 characters.

    >>> first_line(ValueError(""))
    'no message'
    """
    lines = (str(problem).strip() or "no message").splitlines()
    if "TorchScript interpreter" in lines[0]:  # what was raised stands below the trace
        lines = [line for line in lines if line.startswith("RuntimeError: ")] or lines
    return lines[0][:300]


def _describe(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    shapes = [f"{list(a.shape)} {str(a.dtype).removeprefix('torch.')}" for a in args if isinstance(a, Tensor)]
    shapes += [f"{k}={list(v.shape)}" for k, v in kwargs.items() if isinstance(v, Tensor)]
    return "called with " + ", ".join(shapes) if shapes else "called without tensors"


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise SubjectTimeoutError when the block runs longer; needs the main thread of a Unix process, else no limit.

    A hang inside a C extension is not interrupted by this; the command line runs subjects in processes for that.
    """
    if seconds <= 0 or not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(signum: int, frame: object) -> None:
        raise SubjectTimeoutError(f"one call of the subject took longer than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    remaining, interval = signal.setitimer(signal.ITIMER_REAL, seconds)
    started = time.perf_counter()
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if remaining:
            left = max(remaining - (time.perf_counter() - started), 1e-3)
            signal.setitimer(signal.ITIMER_REAL, left, interval)

"""Calls of somebody's code: limited in time, warnings kept quiet, whatever it raises told in one sentence."""

from __future__ import annotations

import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor


class SubjectError(Exception):
    """The subject raised, or returned something that its kind does not allow; says which in one sentence."""


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

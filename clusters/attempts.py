"""Calls handed to an executor, each begun again when the worker under it dies."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from typing import Any, Generic, Protocol, TypeVar

ATTEMPTS = 3
"""Times a call is begun when workers die under it, before it counts as the cause of their deaths."""

_DEATHS = ("ProcessExpired", "BrokenProcessPool", "KilledWorker", "CancelledError", "UncompletedJobError")
Key = TypeVar("Key", bound=Hashable)
_Call = tuple[Callable[..., Any], tuple[Any, ...]]


class Executor(Protocol):
    """What a call is handed to."""

    def submit(self, function: Callable[..., Any], /, *arguments: Any) -> Future[Any]:
        """Begin a call elsewhere."""


class Attempts(Generic[Key]):
    """The calls that an executor has at the moment, by a key each."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._running: dict[Future[Any], tuple[Key, _Call, int]] = {}

    def __len__(self) -> int:
        return len(self._running)

    def begin(self, key: Key, function: Callable[..., Any], *arguments: Any) -> None:
        """Hand over a call."""
        self._submit(key, (function, arguments), 1)

    def _submit(self, key: Key, call: _Call, attempt: int) -> None:
        function, arguments = call
        self._running[self._executor.submit(function, *arguments)] = (key, call, attempt)

    def ended(self) -> Iterator[tuple[Key, Any | BaseException]]:
        """Yield the calls that have ended, with what they returned or why they failed; wait a second for one at most.

        A limit, so that Ctrl-C is heard where a wait without one would not be interrupted.
        """
        for future in wait(self._running, timeout=1, return_when=FIRST_COMPLETED).done:
            key, call, attempt = self._running.pop(future)
            problem = _problem(future)
            if problem is not None and is_death(problem) and attempt < ATTEMPTS:
                self._submit(key, call, attempt + 1)
            else:
                yield key, future.result() if problem is None else problem

    def cancel(self) -> None:
        """Take back what was not begun."""
        for future in self._running:
            future.cancel()


def _problem(future: Future[Any]) -> BaseException | None:
    try:
        return future.exception()
    except CancelledError as cancelled:
        return cancelled


def is_death(problem: BaseException) -> bool:
    """Return whether the worker died, rather than the call failing in it."""
    return type(problem).__name__ in _DEATHS

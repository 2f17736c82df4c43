"""Seconds that count, and what a process tells of itself: a clock that another's load does not move, and a pulse.

Loads no torch: the process that waits for an answer reads the same numbers as the one that works on it.
"""

from __future__ import annotations

import os
from collections.abc import MutableSequence
from time import perf_counter  # bound here: what is judged may put something else into the module

OURS, CALLED, UNLIMITED = 0.0, 1.0, 2.0
"""What a process does: veriformer's own work, a call of the subject, a call that no limit holds for."""

_open, _read, _close = os.open, os.read, os.close


def waited(process: int | str = "self") -> float:
    """Return the seconds in which a process was ready to run and others ran instead; 0 where that is not told."""
    try:
        file = _open(f"/proc/{process}/schedstat", os.O_RDONLY)
    except OSError:
        return 0.0
    try:
        return int(_read(file, 100).split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0
    finally:
        _close(file)


def counted(process: int | str = "self") -> float:
    """Return a time in seconds that stands still while a process waits for others, and goes on while it sleeps.

    Computing and sleeping count, since both can last for ever; what another's load takes is nobody's fault.
    """
    return perf_counter() - waited(process)


SIZE = 6
"""Numbers of a pulse."""

ENDED_FOR = 5
"""Place of the number that says why a process was ended by the one that looks after it; 0 where it was not."""


class Pulse:
    """What a process is doing, in numbers that another one sees.

    Attributes:
        numbers: twice how often that changed, odd while it is changing; what it is now (`OURS`, `CALLED`, `UNLIMITED`),
            the limit of the call in seconds, how many calls were ended by their limit, the id of the process, and why
            it was ended; in shared memory where another process looks.
        is_watched: whether one does, and ends this one if a call does not end.
    """

    def __init__(self) -> None:
        self.numbers: MutableSequence[float] = [0.0] * SIZE
        self.is_watched = False

    def share(self, numbers: MutableSequence[float]) -> None:
        """Let another process see the numbers."""
        self.numbers, self.is_watched = numbers, True
        numbers[4] = os.getpid()

    def begin(self, seconds: float) -> tuple[float, float]:
        """Tell that a call begins, limited to so many seconds (0: not at all); returns what `end` needs."""
        before = (self.numbers[1], self.numbers[2])
        self._change(CALLED if seconds > 0 else UNLIMITED, seconds)
        return before

    def restart(self) -> None:
        """Tell that the clock of the call starts anew."""
        self.numbers[0] += 2

    def end(self, before: tuple[float, float]) -> None:
        """Tell that the call ended."""
        self._change(*before)

    def _change(self, doing: float, limit: float) -> None:
        """Write two numbers; who reads in between sees that they do not belong together (see `read`)."""
        self.numbers[0] += 1
        self.numbers[1], self.numbers[2] = doing, limit
        self.numbers[0] += 1

    def hung(self) -> None:
        """Tell that a call was ended by its limit."""
        self.numbers[3] += 1

    @property
    def hangs(self) -> int:
        """Calls that were ended by their limit."""
        return int(self.numbers[3])


def read(numbers: MutableSequence[float]) -> tuple[float, float, float] | None:
    """Return what another process tells: how often it changed, what it does, the limit; None while it is changing."""
    serial, doing, limit = numbers[0], numbers[1], numbers[2]
    return None if serial % 2 or numbers[0] != serial else (serial, doing, limit)


PULSE = Pulse()
"""Of this process."""

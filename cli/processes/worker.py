"""One process that judges, seen from the one that asks it: what it is asked, whether it still answers, how it ended."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Sequence
from typing import Any

from veriformer.cli.processes.limits import Limits
from veriformer.cli.processes.printed import Outlet, Printed
from veriformer.cli.processes.template import template
from veriformer.cli.processes.wire import NoAnswerError, Wire
from veriformer.clusters.safe_path import safe_path
from veriformer.properties.adapters.spawned import announce
from veriformer.properties.results.clocks import CALLED, ENDED_FOR, OURS, SIZE, read, waited

START = 120.0
"""Seconds for a process to import torch on a slow disk."""

BETWEEN = 60.0
"""Seconds that count for veriformer's own work between two calls of a subject: gradients, references, searches."""

ANSWERING = "veriformer.cli.processes.answering"


def patience(limit: float) -> float:
    """Return the seconds after which a call is ended from outside: its process is given time to end it itself."""
    return 1.5 * limit + 0.2


def _begin(*arguments: Any) -> None:
    # what is judged may start processes, which multiprocessing forbids those that end with their parent: the nurse ends
    # them; the parent ends this one still
    multiprocessing.current_process().daemon = False
    multiprocessing.set_start_method(None, force=True)  # as this system has it, not as this process was started
    announce()
    from veriformer.cli.processes.answering import serve  # imports torch, which the asking side never does

    serve(*arguments)


class Worker:
    """One process that judges.

    Attributes:
        home: target whose code it runs; no other is ever loaded there. "" for veriformer's own.
        modules: that it imports once, to answer each question by a copy of itself; None if it answers all itself.
        printed: by it since the last question.
        is_spent: it said that it can answer nothing more.
        has_fallen: a call hung in the question that was answered last.
    """

    def __init__(
        self, settings: dict[str, Any], limits: Limits, home: str = "", modules: Sequence[str] | None = None
    ) -> None:
        context = template(ANSWERING)
        ours, theirs = socket.socketpair()
        pipe, output = context.Pipe(duplex=False)
        self._pulse = context.RawArray("d", SIZE)
        self.home, self.modules, self._limits = home, modules, limits
        self.process = context.Process(
            target=_begin, args=(theirs, output, self._pulse, settings, limits, modules), daemon=True
        )
        with safe_path():  # where the template ended it is started again
            self.process.start()
        theirs.close()
        output.close()
        self.wire, self.outlet = Wire(ours), Outlet(pipe)
        self.printed = Printed()
        self.is_spent = self.has_fallen = False
        self._number = 0
        self._limit = 0.0
        self._began = time.monotonic()
        self._asked = self._changed = 0.0
        self._serial = -1.0
        self._waited = 0.0
        self._stopped_for = ""

    @property
    def is_alive(self) -> bool:
        """Whether it can be asked."""
        return self.process.is_alive()

    def ask(self, question: str, seconds: float, **arguments: Any) -> None:
        """Send a question that must be answered in time.

        Raises:
            OSError: the process is gone.
        """
        self.outlet.drain(self.printed)
        self._number += 1
        self._limit, self.has_fallen, self._began = seconds, False, time.monotonic()
        if self.modules is not None:  # the next copy begins to tell of itself
            self._pulse[4] = self._waited = 0.0
        self._asked = self._changed = self._clock() if self._pulse[4] else 0.0
        self._serial = -1.0
        self.wire.send([self._number, question, arguments])

    def take(self) -> tuple[str, dict[str, Any]] | None:
        """Return the verdict and the answer to the last question, or None if they did not come yet.

        Raises:
            EOFError: the process is gone.
            NoAnswerError: what it sent is no answer.
        """
        while (message := self.wire.take()) is not None:
            match message:
                case [int(number), str(verdict), dict(answer), bool(is_spent), bool(fell)]:
                    if number == self._number:
                        self.is_spent, self.has_fallen = is_spent, fell
                        self.outlet.drain(self.printed)
                        return verdict, answer
                case _:
                    raise NoAnswerError
        return None

    def overdue(self) -> str:
        """Say what took too long, or nothing."""
        if not self._pulse[4]:
            late = time.monotonic() - self._began > START
            return f"its process did not start within {START:g} s" if late else ""
        now = self._clock()
        if not self._asked:
            self._asked = self._changed = now
        told = read(self._pulse)
        serial, doing, limit = told or (-1.0, OURS, 0.0)  # it is changing: what it did before is over
        if serial != self._serial or told is None:
            self._serial, self._changed = serial, now
        spent = now - self._changed
        if doing == CALLED and spent > patience(limit):
            return f"one call of the subject took longer than {limit:g} s and did not react; its process was ended"
        if doing == OURS and self.home and spent > BETWEEN < self._limit:
            return f"the subject took longer than {BETWEEN:g} s outside of its calls; its process was ended"
        if now - self._asked > self._limit:
            return f"the subject did not come back within {self._limit:g} s and was stopped"
        return ""

    def _clock(self) -> float:
        """Return a time that stands still while the process waits for others."""
        self._waited = max(self._waited, waited(int(self._pulse[4])))
        return time.monotonic() - self._waited

    def stop(self) -> None:
        """End the process and all that it started, whatever it is doing."""
        self.process.terminate()
        if self.process.pid and hasattr(signal, "SIGCONT"):
            with contextlib.suppress(OSError):
                os.kill(self.process.pid, signal.SIGCONT)  # it may have been stopped by what it looks after
        self.process.join(2)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.outlet.drain(self.printed)
        self.wire.close()
        self.outlet.close()

    def release(self) -> None:
        """Let an idle process end by itself, so that it leaves nothing behind."""
        self.wire.close()

    def epitaph(self) -> str:
        """Say how the process ended."""
        self.process.join(2)
        code = self.process.exitcode
        if self._pulse[ENDED_FOR]:
            return f"the process {self._limits.sentence(int(self._pulse[ENDED_FOR]))}"
        if code is None:
            return "the process closed its connection"
        if code < 0:
            return f"the process was ended by {signal_name(-code)}"
        return f"the process ended with status {code}"


@functools.cache
def signal_name(number: int) -> str:
    """Return the name of a signal, or its number where it has none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"

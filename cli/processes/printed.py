"""What a process prints, kept by the process that asked it: the end of it, and how much there was."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection
from typing import Any

from veriformer.reports.printed import KEPT
from veriformer.reports.readable import readable

_AT_ONCE = 64  # parts of 64 KiB in one go, so that one that prints without end keeps nobody waiting


class Printed:
    """The end of what was printed.

    Attributes:
        kept: the last bytes.
        size: bytes in all.
    """

    def __init__(self, kept: bytes = b"", size: int = 0) -> None:
        self.kept = kept
        self.size = size

    def add(self, part: bytes) -> None:
        """Take up what was printed next."""
        self.size += len(part)
        self.kept = (self.kept + part)[-KEPT:]

    def __iadd__(self, other: Printed) -> Printed:
        """Take up what another one has."""
        size = self.size + other.size
        self.add(other.kept)
        self.size = size
        return self

    @property
    def text(self) -> str:
        """What was kept; bytes that are no text are escaped."""
        return self.kept.decode("utf-8", "backslashreplace")

    @property
    def shown(self) -> dict[str, Any] | None:
        """As a report has it: words in lines, nothing that a terminal would obey; None if nothing was printed."""
        return {"size": self.size, "text": readable(self.text)} if self.size else None

    @property
    def last_words(self) -> str:
        """The last line, cut to 200 characters; empty if nothing was printed."""
        lines = [line.strip() for line in self.text.splitlines() if line.strip()]
        return lines[-1][:200] if lines else ""


class Outlet:
    """The end of a pipe from which a process's outputs are read."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe
        self.is_open = True
        os.set_blocking(pipe.fileno(), False)

    def drain(self, printed: Printed) -> None:
        """Take up what was printed so far."""
        for _ in range(_AT_ONCE if self.is_open else 0):
            try:
                part = os.read(self.pipe.fileno(), 2**16)
            except BlockingIOError:
                return
            except OSError:
                part = b""
            if not part:
                self.is_open = False
                return
            printed.add(part)

    def close(self) -> None:
        """Close it."""
        self.is_open = False
        self.pipe.close()

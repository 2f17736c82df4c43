"""What the code of a subject printed, in reports: the end of it, and how much is left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

KEPT = 2**16
"""Bytes that are kept of what a subject prints: the last ones."""


@dataclass(frozen=True)
class Shown:
    """What is shown of it.

    Attributes:
        text: the end of it, in lines.
        size: bytes that were printed.
        dropped: bytes before `text`, which are not shown.
    """

    text: str
    size: int
    dropped: int

    @property
    def told(self) -> str:
        """Say how much was printed, and how much of it is not here.

        >>> Shown("", 70000, 4464).told, Shown("", 2, 0).told
        ('printed 70,000 bytes; the first 4,464 are left out', 'printed 2 bytes')
        """
        left_out = f"; the first {self.dropped:,} are left out" if self.dropped else ""
        return f"printed {self.size:,} bytes{left_out}"


def shown(subject: Mapping[str, Any], most: int = KEPT) -> Shown | None:
    """Return what is shown of what a subject printed; None if it printed nothing.

    Args:
        subject: of a report.
        most: characters that are shown, the last ones.
    """
    printed = subject.get("printed")
    if not printed:
        return None
    text, cut = printed["text"][-most:], printed["text"][:-most]
    before = max(printed["size"] - KEPT, 0)
    return Shown(text, printed["size"], before + len(cut.encode("utf-8", "backslashreplace")))

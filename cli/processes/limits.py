"""What a process that judges may take, with all that it starts: held by the system where it can, else watched."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """What one process and its descendants may take.

    Attributes:
        memory_gib: of address space for each of them, and of memory for all together; 0 for no limit.
        processes: descendants at a time; loaders of data and compilers start a few dozen at most.
        files: that each of them has open at a time.
        written_gib: that they write to files and pipes, all together, and that one file holds.
    """

    memory_gib: float = 8.0
    processes: int = 64
    files: int = 4096
    written_gib: float = 4.0

    def exceeded(self, processes: int, memory: int, written: int) -> int:
        """Return the number of the sentence that says what is too much; 0 where nothing is.

        Args:
            processes: descendants now.
            memory: bytes that they fill.
            written: bytes that they wrote.
        """
        if processes > self.processes:
            return 1
        if memory > self.memory_gib * 2**30 > 0:
            return 2
        return 3 * (written > self.written_gib * 2**30)

    def sentence(self, number: int) -> str:
        """Say what was too much, as the end of a sentence about a process.

        >>> Limits(processes=9).sentence(1)
        'was ended for starting more than 9 others at a time'
        """
        return "was ended for " + {
            1: f"starting more than {self.processes} others at a time",
            2: f"filling more than {self.memory_gib:g} GiB of memory, with all that it started,",
            3: f"writing more than {self.written_gib:g} GiB, with all that it started,",
        }.get(number, "taking more than it may")

    def hold(self) -> None:
        """Let the system refuse this process what is too much for one, and what it starts."""
        try:
            import resource
        except ImportError:  # not a Unix system: no limit
            return
        for kind, limit in (
            (resource.RLIMIT_AS, int(self.memory_gib * 2**30)),
            (resource.RLIMIT_NOFILE, self.files),
            (resource.RLIMIT_FSIZE, int(self.written_gib * 2**30)),
        ):
            soft, hard = resource.getrlimit(kind)
            if limit > 0 and (soft == resource.RLIM_INFINITY or soft > limit):
                with contextlib.suppress(ValueError, OSError):
                    resource.setrlimit(kind, (limit, hard))

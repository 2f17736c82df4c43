"""A process that judges: what hangs, crashes or eats memory there costs one result, not the run."""

from __future__ import annotations

import contextlib
import os
import sys
from multiprocessing.connection import Connection
from typing import Any

Message = tuple[str, dict[str, Any]]


def serve(connection: Connection, settings: dict[str, Any], memory_gib: float) -> None:
    """Answer requests until the connection closes.

    Args:
        connection: receives `(question, arguments)`, sends `("ok", answer)` or `("refused", sentence)`.
        settings: fields of `Settings`, dtypes as names.
        memory_gib: limit of the address space on the CPU; 0 for none.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.stdout = sys.stderr  # what a subject prints must not mix with a report on standard output
    import torch

    torch.set_num_threads(1)
    limit_memory(memory_gib if settings["device"] == "cpu" else 0)
    from veriformer.cli.questions import Answers

    answers = Answers(settings)
    with contextlib.suppress(EOFError, KeyboardInterrupt, BrokenPipeError):
        while True:
            question, arguments = connection.recv()
            connection.send(answers.answer(question, arguments))


def limit_memory(gib: float) -> None:
    """Limit the address space of this process; 0 for no limit."""
    if gib <= 0:
        return
    try:
        import resource
    except ImportError:  # not a Unix system: no limit
        return
    limit = int(gib * 2**30)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))

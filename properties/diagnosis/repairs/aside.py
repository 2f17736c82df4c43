"""A question that is put to a copy of this process: what it does to models, tables and memories stays there."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

import torch


def aside(questions: Sequence[Callable[[], Any]], seconds: float) -> list[Any]:
    """Return the answers of copies of this process, one a question, which end with them; None where none came.

    Args:
        questions: each gives what JSON can say; all are put at once.
        seconds: of waiting for all.
    """
    if not hasattr(os, "fork"):
        return [None] * len(questions)
    until, copies = monotonic() + seconds, list[tuple[int, int]]()
    try:
        for question in questions:
            ours, theirs = os.pipe()
            copy = _copied()
            if copy == 0:
                _answer(question, theirs)
            os.close(theirs)
            copies.append((copy, ours))
        return [_said(_read(ours, until)) for _, ours in copies]
    finally:
        for copy, ours in copies:
            os.close(ours)
            os.kill(copy, signal.SIGKILL)
            os.waitpid(copy, 0)


def at_once() -> int:
    """Return how many copies may work at once."""
    return min(4, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def _said(text: bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _copied() -> int:
    told = sys.unraisablehook
    sys.unraisablehook = lambda _: None  # what libraries say of a fork, and of threads that it does not copy
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return os.fork()
    finally:
        sys.unraisablehook = told


def _answer(question: Callable[[], Any], pipe: int) -> None:
    """Answer, and end: nothing that was to be done at the end of this process is done by its copy."""
    try:
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nowhere, stream)
        torch.set_num_threads(1)  # the threads of this process are not there
        with os.fdopen(pipe, "w") as out:
            json.dump(question(), out)
    finally:
        os._exit(0)


def _read(pipe: int, until: float) -> bytes:
    text = b""
    while (left := until - monotonic()) > 0:
        if not select.select([pipe], [], [], left)[0]:
            break
        part = os.read(pipe, 65536)
        if not part:
            break
        text += part
    return text

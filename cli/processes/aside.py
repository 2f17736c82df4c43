"""What somebody's code prints in a process of ours goes aside: to standard error, as words, and not into an answer."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

from veriformer.cli.processes.nursing import flush_c
from veriformer.cli.processes.printed import Printed
from veriformer.cli.speaking import say

_SHOWN = 2000  # characters, of each time that something was printed
_PATIENCE = 1.0  # seconds for what is still in the pipe, where a process that was started holds it open


@contextmanager
def printed_aside(whose: str) -> Iterator[None]:
    """Run the block with the descriptors 1 and 2 taken; then say what was printed, and how much, however it ends.

    Args:
        whose: code it is, in words.
    """
    printed = Printed()
    try:
        with _taken(printed):
            yield
    finally:
        if printed.size:
            text = printed.text
            cut = f", the last {_SHOWN} characters:" if len(text) > _SHOWN else ":"
            say(f"{whose} printed {printed.size} bytes{cut}\n{text[-_SHOWN:].rstrip()}", aside=True)


@contextmanager
def _taken(printed: Printed) -> Iterator[None]:
    """Let what is written to the descriptors 1 and 2 in the block be kept there."""
    before = sys.stdout, sys.stderr
    _flush(*before)
    kept = [os.dup(number) for number in (1, 2)]
    inner, outer = os.pipe()
    reader = threading.Thread(target=_read, args=(inner, printed), daemon=True)
    reader.start()
    for number in (1, 2):
        os.dup2(outer, number)
    os.close(outer)
    streams = [os.fdopen(number, "w", 1, "utf-8", "backslashreplace", closefd=False) for number in (1, 2)]
    sys.stdout, sys.stderr = streams
    try:
        yield
    finally:
        _flush(*streams)
        flush_c()
        for number, descriptor in zip((1, 2), kept, strict=True):
            os.dup2(descriptor, number)
            os.close(descriptor)
        sys.stdout, sys.stderr = before
        reader.join(_PATIENCE)


def _read(inner: int, printed: Printed) -> None:
    while part := os.read(inner, 2**16):
        printed.add(part)
    os.close(inner)


def _flush(*streams: IO[str]) -> None:
    for stream in streams:
        with contextlib.suppress(Exception):  # whatever stands there
            stream.flush()

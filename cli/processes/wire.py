"""What two processes say to one another: lines of JSON over a socket, of which one side may be broken on purpose."""

from __future__ import annotations

import json
import socket
from typing import Any

_LONGEST = 2**28  # bytes of one message: a thousand times the largest answer
_dumps, _send, _wait = json.dumps, socket.socket.sendall, socket.socket.settimeout  # what is judged may change them
_PATIENCE = 5.0  # seconds until a process that reads nothing is taken for dead


class NoAnswerError(Exception):
    """What came is no message."""


class Wire:
    """One end of a connection. Nothing that comes over it is run, or waited for in the middle."""

    def __init__(self, end: socket.socket) -> None:
        self.end = end
        self._begun = bytearray()
        self._lines: list[bytes] = []

    def send(self, message: Any) -> None:
        """Send one message.

        Raises:
            OSError: the other side is gone, or does not read.
        """
        _wait(self.end, _PATIENCE)
        _send(self.end, _dumps(message).encode("ascii") + b"\n")

    def receive(self) -> Any:
        """Wait for one message.

        Raises:
            EOFError: the other side is gone.
        """
        self.end.settimeout(None)
        while not self._lines:
            self._read()
        return json.loads(self._lines.pop(0))

    def push(self, message: Any) -> None:
        """Let a message be received next, as if it had come."""
        self._lines.insert(0, json.dumps(message).encode("ascii"))

    def take(self) -> Any:
        """Return one message of those that came, or None; never waits.

        Raises:
            EOFError: the other side is gone.
            NoAnswerError: what came is no message.
        """
        self.end.settimeout(0)
        try:
            while not self._lines:
                self._read()
            return json.loads(self._lines.pop(0))
        except BlockingIOError:
            return None
        except (ValueError, RecursionError):
            raise NoAnswerError from None

    def close(self) -> None:
        """Close this end."""
        self.end.close()

    def _read(self) -> None:
        try:
            part = self.end.recv(2**18)
        except ConnectionError:
            part = b""
        if not part:
            raise EOFError
        *ended, rest = part.split(b"\n")
        for line in ended:
            self._lines.append(bytes(self._begun) + line)
            self._begun.clear()
        self._begun += rest
        if len(self._begun) > _LONGEST:
            raise NoAnswerError

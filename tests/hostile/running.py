"""Running a command in this process, on a terminal of any encoding and any disk."""

from __future__ import annotations

import io
import re
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest

from veriformer.cli.main import main

CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""What no terminal and no page may get of a file, a name or a message; tabs and ends of lines are left."""


@dataclass
class Told:
    """What a command did: its status, and what it wrote."""

    status: int
    out: str
    err: str

    @property
    def sentence(self) -> str:
        """What it said on standard error, in one line whatever the width."""
        return " ".join(self.err.split())

    def insist(self) -> Told:
        """Hold what every run of every command owes its reader against this one."""
        assert self.status in (0, 1, 2, 3), self
        for text in (self.out, self.err):
            assert not CONTROLS.search(text), self
            assert "Traceback" not in text, self
            assert "please report this" not in text, self
        assert self.status != 3 or len(re.findall("^Error: |^not written", self.err, re.MULTILINE)) == 1, self
        return self


class _Bytes(io.BytesIO):
    """Keeps its content when the stream around it is closed."""

    def close(self) -> None:
        return


def run(*arguments: str, encoding: str = "utf-8", full: bool = False) -> Told:
    """Run `veriformer`.

    Args:
        arguments: of the command.
        encoding: of both streams, strict as a terminal's.
        full: whether standard output goes to a disk without space.
    """
    written, complained = _Bytes(), _Bytes()
    out = io.TextIOWrapper(written, encoding, write_through=True)
    err = io.TextIOWrapper(complained, encoding, write_through=True)
    with ExitStack() as stack, redirect_stderr(err):
        if full:
            out = Path("/dev/full").open("w", encoding=encoding)  # noqa: SIM115
            stack.callback(out.close)
        stack.enter_context(redirect_stdout(out))
        with pytest.raises(SystemExit) as ended:
            main(arguments)
    assert isinstance(ended.value.code, int), ended.value.code
    return Told(ended.value.code, written.getvalue().decode(encoding), complained.getvalue().decode(encoding))

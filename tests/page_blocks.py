"""The code of a hand-written page, run as a reader would: block after block, in one folder and one process."""

from __future__ import annotations

import contextlib
import doctest
import io
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from veriformer.cli.main import main

_FENCE = re.compile(r"^(?P<in> *)```(?P<head>[^\n`]*)\n(?P<body>.*?)^(?P=in)```$", re.MULTILINE | re.DOTALL)
_TITLE = re.compile(r'title="([^"]+)"')
_CHECKER = doctest.OutputChecker()
_VARIES = re.compile(
    r"-?\d+\.\d+(?:e[+-]?\d+)?|-?\d+e[+-]?\d+|index \[[\d, ]+\]|\b[0-9a-f]{8}\b|\(\d+ in the catalogue\)"
)
"""In what a command prints: measured numbers, names of cases, and the size of the catalogue, which grows."""
SET_UP = ("pip install ", "git clone ", "cd ", "python -m venv ", "make ")
"""Commands that a page may show and that are not run here: they fetch and install."""


@dataclass(frozen=True)
class Block:
    """One fenced block: its language, the file that its title names, its text."""

    language: str
    title: str
    text: str


def blocks(page: str) -> Iterator[Block]:
    """Give the fenced blocks of a page, in order."""
    for found in _FENCE.finditer(page):
        indent = found["in"]
        text = "".join(line.removeprefix(indent) for line in found["body"].splitlines(keepends=True))
        language, _, rest = found["head"].strip().partition(" ")
        title = _TITLE.search(rest)
        yield Block(language, title[1] if title else "", text)


class Reader:
    """Does what a page says, in the current folder.

    Attributes:
        names: what the page's Python has defined so far.
        status: exit status of the last command.
        printed: by the last block.
    """

    def __init__(self) -> None:
        self.names: dict[str, Any] = {"__name__": "page"}
        self.status, self.printed = 0, ""

    def follow(self, block: Block) -> None:
        """Write, run or compare one block.

        Raises:
            AssertionError: it prints something else than the page shows, or a command has another status.
        """
        if block.language == "python" and not block.title:
            with self._keeping():
                exec(compile(block.text, "<page>", "exec", dont_inherit=True), self.names)
        elif block.title == "prints":
            self._compare(block.text, "the block above")
        elif block.title:
            place = Path(block.title)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(block.text, encoding="utf-8")
        elif block.language in ("bash", "console"):
            for command, shown in _commands(block):
                self._run(command, must_hold=block.language == "bash")
                if shown:
                    self._compare(shown, command, varies=command.startswith("veriformer"))

    def _run(self, command: str, *, must_hold: bool) -> None:
        if command.startswith(SET_UP):
            return
        command, _, wanted = command.partition("  # exit status ")
        if command == "echo $?":
            self.printed = str(self.status)
            return
        program, *words = shlex.split(command, comments=True)
        with self._keeping():
            self.status = {"veriformer": _veriformer, "python": _python, "pytest": _pytest, "cat": _cat}[program](words)
        if wanted or must_hold:
            assert self.status == int(wanted or 0), f"{command}: {self.status}\n{self.printed}"

    @contextlib.contextmanager
    def _keeping(self) -> Iterator[None]:
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
            yield
        self.printed = "\n".join(line.rstrip() for line in out.getvalue().splitlines())

    def _compare(self, shown: str, source: str, *, varies: bool = False) -> None:
        wanted = "\n".join(line.rstrip() for line in shown.strip("\n").splitlines())
        texts = [_VARIES.sub("#", t) if varies else t for t in (wanted, self.printed.strip("\n"))]
        same = _CHECKER.check_output(texts[0] + "\n", texts[1] + "\n", doctest.ELLIPSIS)
        assert same, f"{source}: the page shows\n{wanted}\n\nand there came\n{self.printed}"


def forget(folder: Path) -> None:
    """Let go of the modules that were imported from a folder, so that another page may have some of the same names."""
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(str(folder)):
            del sys.modules[name]


def _commands(block: Block) -> Iterator[tuple[str, str]]:
    """Give each command of a block and what is shown of its output; in a block of `console` those behind `$`."""
    if block.language == "bash":
        yield from ((line, "") for line in block.text.splitlines() if line.strip() and not line.startswith("#"))
        return
    for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        command, _, shown = part.partition("\n")
        yield command, shown


def _veriformer(words: list[str]) -> int:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert isinstance(ended.value.code, int)
    return ended.value.code


def _python(words: list[str]) -> int:
    try:
        runpy.run_path(words[0], run_name="__main__")
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def _pytest(words: list[str]) -> int:
    return int(pytest.main([*words, "-q", "-p", "no:cacheprovider", "--rootdir", ".", "-c", "/dev/null"]))


def _cat(words: list[str]) -> int:
    print(Path(words[0]).read_text(encoding="utf-8"))
    return 0

"""What a command says, on any terminal and to any disk: the two streams, and the one way by which words go to them."""

from __future__ import annotations

import codecs
import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderableType, RenderHook, RenderResult
from rich.segment import Segment

from veriformer.reports.readable import readable

UNWRITTEN = 3
"""The exit status where all holds, and what was asked for could not be written."""

_PLAIN = {"✓": "+", "✗": "x", "■": "#", "·": ".", "–": "-", "—": "-", "−": "-", "×": "x", "∞": "inf", "≤": "<=",
          "≥": ">=", "…": "...", "²": "^2", "‖": "||", "√": "sqrt", "─": "-", "━": "-", "│": "|", "’": "'"}  # fmt: skip
_SPELLED = "veriformer.spelled"


def _plainly(problem: UnicodeError) -> tuple[str, int]:
    """Spell what the encoding of a terminal does not have."""
    if not isinstance(problem, UnicodeEncodeError):
        raise problem
    lost = problem.object[problem.start : problem.end]
    return "".join(_PLAIN.get(c) or c.encode("unicode_escape").decode() for c in lost), problem.end


codecs.register_error(_SPELLED, _plainly)


class Stream:
    """A standard stream that takes every text; the first write that fails is kept, and nothing is written after it.

    Attributes:
        stream: where the text goes; None where Python found the descriptor closed.
        problem: why it could not be written, or None.
        encoding: of what it takes, whatever the stream has.
    """

    encoding = "utf-8"

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.problem: OSError | None = None

    def write(self, text: str) -> int:
        """Write what the encoding has, and spell what it has not.

        Raises:
            TypeError: it is no text.
        """
        if not isinstance(text, str):
            raise TypeError(f"text is required, not {type(text).__name__}")
        name = getattr(self.stream, "encoding", None)
        with self._noted():
            self.stream.write(text.encode(name, _SPELLED).decode(name) if name else text)
        return len(text)

    def flush(self) -> None:
        """Write what is held back."""
        with self._noted():
            self.stream.flush()

    @contextmanager
    def _noted(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, AttributeError) as problem:  # a full disk, a closed stream, none
            told = problem if isinstance(problem, OSError) else OSError(errno.EBADF, os.strerror(errno.EBADF))
            self.problem = self.problem or (None if self.stream is None else told)

    def settle(self) -> OSError | None:
        """Flush, let Python not fail at its end over what cannot be written, and return why it could not."""
        self.flush()
        if self.problem is not None:
            with contextlib.suppress(OSError, ValueError, AttributeError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self.stream.fileno())
                os.close(nowhere)
        return None if isinstance(self.problem, BrokenPipeError) else self.problem  # whoever reads has seen enough

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def streams() -> Iterator[tuple[Stream, Stream]]:
    """Let standard output and standard error take every text while the block runs."""
    before = sys.stdout, sys.stderr
    out, err = Stream(before[0]), Stream(before[1])
    sys.stdout, sys.stderr = out, err
    try:
        yield out, err
    finally:
        sys.stdout, sys.stderr = before


class _Clean(RenderHook):
    """Cleans what a console is given to print, whoever gives it."""

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [_Cleaned(one) for one in renderables]


class _Cleaned:
    def __init__(self, inner: RenderableType) -> None:
        self.inner = inner

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for text, style, control in console.render(self.inner, options):
            yield Segment(text if control else readable(text), style, control)


def screen(*, aside: bool = False) -> Console:
    """Return the console that a command prints on: it takes words as words, no markup and no codes.

    Args:
        aside: whether on standard error, where all stands that is no answer.
    """
    console = Console(stderr=aside, highlight=False, soft_wrap=True, markup=False, emoji=False)
    console.push_render_hook(_Clean())
    return console


def say(text: str, *, aside: bool = False, end: str = "\n") -> None:
    """Write a text as it is, but for control characters.

    Args:
        text: lines.
        aside: whether to standard error.
        end: what follows.
    """
    stream = sys.stderr if aside else sys.stdout
    stream.write(readable(text) + end)
    stream.flush()


class Unwritten:
    """What a command could not write after its work was done: it is said, and the work is not lost."""

    def __init__(self) -> None:
        self.count = 0

    @contextmanager
    def attempt(self, what: str, *others: type[Exception], asked: bool = True) -> Iterator[None]:
        """Run a block that writes something; where it cannot, say so and go on.

        Args:
            what: is written.
            others: exceptions, beside those of the system, that keep it from being written.
            asked: whether the user asked for it, so that the exit status tells.
        """
        try:
            yield
        except Exception as problem:
            if not isinstance(problem, (OSError, *others)):
                raise
            self.count += asked
            place = f" to {problem.filename}" if isinstance(problem, OSError) and problem.filename else ""
            why = (isinstance(problem, OSError) and problem.strerror) or str(problem)
            say(f"not written: {what}{place}: {why}", aside=True)

    def status(self, judged: int) -> int:
        """Return the exit status of a run that judged so: what was found comes first."""
        return UNWRITTEN if judged == 0 and self.count else judged

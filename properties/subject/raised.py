"""What an exception says, in words that can be printed: its type, and the first line of its message."""

from __future__ import annotations


def told(problem: BaseException) -> str:
    """Return the type of an exception and the first line of what it says."""
    return f"{type(problem).__name__}: {first_line(problem)}"


def first_line(problem: BaseException) -> str:
    r"""Return the first line of what an exception says, cut to 300 characters, control characters escaped.

    >>> first_line(ValueError("")), first_line(ValueError("\x1b[31m red"))
    ('no message', '\\x1b[31m red')
    """
    try:
        said = str(problem).strip()
    except BaseException:  # its own words may raise, too
        said = ""
    lines = (said or "no message").splitlines() or ["no message"]
    if "TorchScript interpreter" in lines[0]:  # what was raised stands below the trace
        lines = [line for line in lines if line.startswith("RuntimeError: ")] or lines
    return printable(lines[0][:300])


def printable(text: str) -> str:
    """Return a text in which what moves a cursor, and half a character, is escaped; tabs and line ends stay."""
    known = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return "".join(c if (c >= " " and not "\x7f" <= c < "\xa0") or c in "\t\n" else repr(c)[1:-1] for c in known)

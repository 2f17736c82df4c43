"""Reading and writing records: whole files or none, and nothing in them is ever executed."""

from __future__ import annotations

import errno
import json
import os
import stat
import tempfile
from pathlib import Path
from typing import Any

CASES = Path(".veriformer")
"""Where recorded cases and their scripts lie, below the folder of a run."""


ABLATION = "veriformer-ablation/1"
"""What the record of an ablation says that it is."""


class RecordError(ValueError):
    """A file is not the record that it should be; says which and why."""


def read_bytes(path: Path) -> bytes:
    """Read a file; what is none is not opened, or waited for: a FIFO that nobody writes, a device without an end.

    Raises:
        OSError: it is no regular file, is missing or cannot be read.
    """
    _insist_on_a_file(path.stat(), path)
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    with os.fdopen(handle, "rb") as file:
        _insist_on_a_file(os.fstat(handle), path)  # it may have been replaced meanwhile
        return file.read()


def read_text(path: Path) -> str:
    """Read a file in UTF-8; see `read_bytes`.

    Raises:
        UnicodeDecodeError: it is none.
    """
    return read_bytes(path).decode("utf-8")


def _insist_on_a_file(found: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(found.st_mode):
        kind = next((word for is_one, word in _OTHERS if is_one(found.st_mode)), "something else")
        raise OSError(errno.EINVAL, f"it is {kind}, and a file is required", str(path))


_OTHERS = (
    (stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a FIFO"), (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"), (stat.S_ISBLK, "a device"),
)  # fmt: skip


def write_text(path: Path, text: str) -> None:
    """Write a file in UTF-8, halves of characters spelled; see `write_bytes`."""
    write_bytes(path, text.encode(errors="backslashreplace"))


def hide_from_git(folder: Path) -> None:
    """Put a `.gitignore` into a folder that keeps all of it out of version control, unless one is there."""
    if not (folder / ".gitignore").exists():
        write_text(folder / ".gitignore", "*\n")


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file so that an interruption leaves the old one or the new one, never a part.

    Raises:
        OSError: the disk is full, the place cannot be written to, or what stands there is no file: a device would be
            replaced by one.
    """
    if path.exists():
        _insist_on_a_file(path.stat(), path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        Path(temporary).chmod(0o666 & ~umask)  # a temporary file is the owner's alone
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_json(path: Path, record: Any) -> None:
    """Write a record as JSON; see `write_bytes`."""
    write_text(path, json.dumps(record, indent=1, allow_nan=False) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """Read a record.

    Raises:
        RecordError: the file is missing, truncated, or no JSON object.
        OSError: it is no file, or cannot be read.
    """
    try:
        record = json.loads(read_text(path))
    except FileNotFoundError:
        raise RecordError(f"there is no file {path}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as problem:
        raise RecordError(f"{path} is truncated or was edited: {problem}") from None
    if not isinstance(record, dict):
        raise RecordError(f"{path} holds {type(record).__name__}, where a JSON object is required")
    return record

"""Reading and writing records: whole files or none, and nothing in them is ever executed."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any


class RecordError(ValueError):
    """A file is not the record that it should be; says which and why."""


def write_text(path: Path, text: str) -> None:
    """Write a file in UTF-8, halves of characters spelled; see `write_bytes`."""
    write_bytes(path, text.encode(errors="backslashreplace"))


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file so that an interruption leaves the old one or the new one, never a part.

    Raises:
        OSError: the disk is full, or the place cannot be written to.
    """
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
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RecordError(f"there is no file {path}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as problem:
        raise RecordError(f"{path} is truncated or was edited: {problem}") from None
    if not isinstance(record, dict):
        raise RecordError(f"{path} holds {type(record).__name__}, where a JSON object is required")
    return record

"""Reading files that anybody may have sent: what is no record ends in one sentence, whatever is wrong with it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from veriformer.reports.records import RecordError, read_json


@contextmanager
def one_sentence(path: Path, form: str = "") -> Iterator[None]:
    """Make a RecordError of all that reading or walking a record of any content may raise.

    Args:
        path: of the file.
        form: that it claims to have.

    Raises:
        RecordError: says what is wrong with the file.
    """
    try:
        yield
    except RecordError:
        raise
    except RecursionError:
        raise RecordError(f"{path} nests its data too deeply; give a file that veriformer wrote") from None
    except OSError as problem:
        raise RecordError(
            f"{problem.filename or path}: {problem.strerror or problem}; name another file or folder"
        ) from None
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as problem:
        told = f"{type(problem).__name__}: {shown(problem.args[0] if problem.args else '')}"
        raise RecordError(
            f"{path} is no whole {form + ' ' * bool(form)}record ({told}); give a file that veriformer wrote"
        ) from None


def read_record(path: Path) -> dict[str, Any]:
    """Read a record.

    Raises:
        RecordError: the file is missing, cannot be read, or holds no JSON object.
    """
    with one_sentence(path):
        record = read_json(path)
        left: list[object] = [record]
        while left:
            value = left.pop()
            if isinstance(value, float) and not math.isfinite(value):
                raise RecordError(f"{path} holds {value}, where a finite number is required; it was edited")
            left += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        return record


def shown(value: object) -> str:
    """Return a value as it stands in a sentence: short, whatever it is.

    >>> shown("x" * 100)
    "'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx..."
    """
    try:
        told = str(value) if isinstance(value, BaseException) else repr(value)
    except (ValueError, RecursionError):  # a number of thousands of digits
        return f"a {type(value).__name__} too large to show"
    return told if len(told) <= 60 else f"{told[:60]}..."

"""What options take: numbers that are numbers, devices that there are, folders that can be written to."""

from __future__ import annotations

import math
import re
import tempfile
from pathlib import Path
from typing import Any

import click


class Amount(click.ParamType[float]):
    """A finite number within bounds.

    Attributes:
        least: that is taken; without `or_zero` numbers must be larger than 0.
        most: that is taken.
    """

    name = "number"

    def __init__(self, most: float, *, or_zero: bool = False) -> None:
        self.most, self.or_zero = most, or_zero

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number."""
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not (0 < number <= self.most or (self.or_zero and number == 0)):
            least = "0 (no limit) or a number" if self.or_zero else "a number"
            self.fail(f"{value!r} is not {least} above 0, at most {self.most:g}", param, ctx)
        return number


class Device(click.ParamType[str]):
    """Where tensors lie: `cpu`, `cuda` or `cuda:1`."""

    name = "device"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the device as torch names it."""
        if not re.fullmatch(r"cpu|cuda(:(0|[1-9]\d?))?", str(value)):
            self.fail(f"{value!r} is no device; give cpu, cuda, or cuda:1 for one of several", param, ctx)
        return str(value)


class Folder(click.ParamType[Path]):
    """A folder that can be written to, or made: asked before the work, not after it."""

    name = "directory"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """Return its path."""
        path = Path(value)
        try:
            there = next((p for p in (path, *path.parents) if p.exists()), Path())
            reason = "" if there.is_dir() else f"{str(there)!r} is a file"
            if not reason:
                tempfile.TemporaryDirectory(dir=there, prefix=".veriformer-").cleanup()  # root may "write" anywhere
        except (OSError, ValueError) as problem:
            reason = getattr(problem, "strerror", None) or str(problem)
        if reason:
            self.fail(f"{str(value)!r} cannot be written to: {reason}; name another folder", param, ctx)
        return path


FOLDER, DEVICE = Folder(), Device()
SECONDS = Amount(1e6)
GIBIBYTES = Amount(2**20, or_zero=True)
SEED = click.IntRange(-(2**63) + 1, 2**63 - 1)
PROCESSES = click.IntRange(1, 256)

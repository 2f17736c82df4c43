"""What options take, from the command line or the project: numbers, devices that there are, folders to write to."""

from __future__ import annotations

import math
import re
import tempfile
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from veriformer.cli.project import SUBJECTS, Project, ProjectError, nearest


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


class OfAProject(click.Command):
    """A command whose options take what the pyproject.toml says where they are not given; `Context.obj` is the file."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the file, then the arguments."""
        if not {*args} & {*ctx.help_option_names}:
            try:
                ctx.obj = nearest(Path.cwd())
                ctx.default_map = ctx.obj.defaults(self.params)
            except ProjectError as problem:
                raise click.UsageError(str(problem), ctx) from None
        return super().parse_args(ctx, args)


def told_of_project(ctx: click.Context | None = None) -> str:
    """Return which settings of a command (None: that which runs) come from a pyproject.toml; "" where none does."""
    ctx = ctx or click.get_current_context()
    project = ctx.find_object(Project)
    taken = [name for name in ctx.params if ctx.get_parameter_source(name) is ParameterSource.DEFAULT_MAP]
    keys = {p.name: SUBJECTS if isinstance(p, click.Argument) else p.opts[0].lstrip("-") for p in ctx.command.params}
    named = [keys[name] for name in taken]
    return f"settings from {project.name}: {', '.join(named)}" if project and named else ""


FOLDER, DEVICE = Folder(), Device()
SECONDS = Amount(1e6)
GIBIBYTES = Amount(2**20, or_zero=True)
SEED = click.IntRange(-(2**63) + 1, 2**63 - 1)
PROCESSES = click.IntRange(1, 256)

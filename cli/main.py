"""`veriformer`: the entry point, and the exit statuses."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import io
import os
import re
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import click

from veriformer.cli.speaking import UNWRITTEN, say, streams
from veriformer.clusters.opening import ClusterError

NOTHING_JUDGED, USAGE, INTERRUPTED = 2, 3, 130


_COMMANDS = {
    "check": "veriformer.cli.check:check",
    "identify": "veriformer.cli.identify:identify",
    "init": "veriformer.cli.init:init",
    "list": "veriformer.cli.listing:list_properties",
    "kinds": "veriformer.cli.words:kinds",
    "facts": "veriformer.cli.words:facts",
    "explain": "veriformer.cli.explain:explain",
    "replay": "veriformer.cli.replay:replay",
    "mutants": "veriformer.cli.mutants:mutants",
    "sweep": "veriformer.cli.sweep:sweep",
    "compare": "veriformer.cli.compare:compare",
    "ablate": "veriformer.cli.ablate:ablate",
    "claims": "veriformer.cli.claims:claims",
    "report": "veriformer.cli.report:report",
}
"""Where each command is: imported when it is run, so that what needs no torch does not wait for it."""


class _Commands(click.Group):
    """A group whose commands are imported when they are asked for; its help reads their first sentences."""

    def list_commands(self, ctx: click.Context | None) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context | None, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, _, name = _COMMANDS[cmd_name].partition(":")
        command: click.Command = getattr(importlib.import_module(module), name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, first_sentence(where)) for name, where in _COMMANDS.items()])


def first_sentence(where: str) -> str:
    """Return the first sentence of a command's docstring, read from its file without importing it."""
    module, _, name = where.partition(":")
    found = importlib.util.find_spec(module)
    assert found is not None
    assert found.origin is not None
    tree = ast.parse(Path(found.origin).read_text(encoding="utf-8"))
    function = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name)
    return " ".join((ast.get_docstring(function) or "").split("\n\n")[0].split())


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="veriformer")
def commands() -> None:
    """Check Transformer implementations against properties that every right one has.

    Exit status: 0 all applicable properties hold, 1 a violation, 2 nothing could be judged (of one subject, where
    the others hold), 3 usage, or all holds and what was asked for could not be written.
    """


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit with its status."""
    with streams() as (out, err):
        status = _status(sys.argv[1:] if arguments is None else list(arguments))
        if lost := out.settle():
            say(f"not written: standard output: {lost.strerror}", aside=True)
            status = status or UNWRITTEN
        err.settle()
    sys.exit(status)


def _status(words: list[str]) -> int:
    """Run a command; whatever ends it ends in a sentence."""
    try:
        if any("\0" in word or not _is_of_the_system(word) for word in words):
            raise click.UsageError("an argument holds a character that no name and no file has")
        with commands.make_context("veriformer", words) as context:
            status = commands.invoke(context)
        return status if isinstance(status, int) else 0
    except click.exceptions.Exit as ended:  # of --help and --version
        return ended.exit_code
    except click.ClickException as problem:
        told = io.StringIO()
        problem.show(told)
        say(re.sub(r"(?s)(.{1000}).{1000,}(.{1000})", r"\1 ... \2", told.getvalue()), aside=True, end="")
        return USAGE
    except ClusterError as problem:
        say(f"Error: {problem}", aside=True)
        return USAGE
    except (click.Abort, KeyboardInterrupt):
        say("interrupted", aside=True)
        return INTERRUPTED
    except OSError as problem:
        say(f"Error: {problem.filename or 'the system'}: {problem.strerror or problem}; name another file or folder",
            aside=True)  # fmt: skip
        return USAGE
    except Exception as problem:
        last = traceback.extract_tb(problem.__traceback__)[-1]
        told_of = f"{type(problem).__name__}: {problem} ({Path(last.filename).name}, line {last.lineno})"
        say(f"Error: veriformer itself failed: {told_of}; please report this", aside=True)
        return NOTHING_JUDGED


def _is_of_the_system(word: str) -> bool:
    try:
        return bool(os.fsencode(word)) or not word
    except UnicodeEncodeError:
        return False

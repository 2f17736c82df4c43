"""`veriformer`: the entry point, and the exit statuses."""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import click

from veriformer.cli.ablate import ablate
from veriformer.cli.check import check
from veriformer.cli.compare import compare
from veriformer.cli.explain import explain
from veriformer.cli.identify import identify
from veriformer.cli.listing import list_properties
from veriformer.cli.mutants import mutants
from veriformer.cli.replay import replay
from veriformer.cli.report import report
from veriformer.cli.speaking import UNWRITTEN, say, streams
from veriformer.cli.sweep import sweep
from veriformer.clusters.opening import ClusterError

NOTHING_JUDGED, USAGE, INTERRUPTED = 2, 3, 130


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="veriformer")
def commands() -> None:
    """Check Transformer implementations against properties that every right one has.

    Exit status: 0 all applicable properties hold, 1 a violation, 2 nothing could be judged, 3 usage, or all holds and
    what was asked for could not be written.
    """


for _command in (check, identify, list_properties, explain, replay, mutants, sweep, compare, ablate, report):
    commands.add_command(_command)


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
        say(told.getvalue(), aside=True, end="")
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

"""`veriformer`: the entry point, and the exit statuses."""

from __future__ import annotations

import sys
from collections.abc import Sequence

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
from veriformer.cli.sweep import sweep
from veriformer.clusters.opening import ClusterError

USAGE = 3


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="veriformer")
def commands() -> None:
    """Check Transformer implementations against properties that every right one has.

    Exit status: 0 all applicable properties hold, 1 a violation, 2 nothing could be judged, 3 usage.
    """


for _command in (check, identify, list_properties, explain, replay, mutants, sweep, compare, ablate, report):
    commands.add_command(_command)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit with its status."""
    try:
        status = commands.main(args=arguments, prog_name="veriformer", standalone_mode=False)
    except click.UsageError as problem:
        problem.show()
        sys.exit(USAGE)
    except click.ClickException as problem:
        problem.show()
        sys.exit(USAGE)
    except ClusterError as problem:
        click.UsageError(str(problem)).show()
        sys.exit(USAGE)
    except click.Abort:
        click.echo("interrupted", err=True)
        sys.exit(130)
    sys.exit(status if isinstance(status, int) else 0)

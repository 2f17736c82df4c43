"""`veriformer init TARGET`: the Subject that was understood, as a file to begin with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from veriformer.cli.plugged import with_plugins
from veriformer.cli.processes.asking import Pool, RefusedError, warm_up
from veriformer.cli.saying import said, saying_options
from veriformer.cli.speaking import say
from veriformer.reports.records import write_text


@click.command()
@click.argument("target")
@saying_options
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="file to write; it must not be there yet")
def init(target: str, kind: str | None, declares: dict[str, Any], out: Path | None) -> int:
    """Print the Subject that is understood of TARGET, a class, function or instance of yours, as a Python file.

    Put it beside your file, change what was guessed wrong, and judge it: veriformer check FILE:mine. Exit status: 0,
    or 2 where nothing could be understood.
    """
    if out is not None and out.exists():
        raise click.UsageError(f"{out} is there already; name another file, or move it away")
    warm_up()
    settings = {
        "profile": "quick",
        "seed": 0,
        "device": "cpu",
        "dtypes": (),
        "call_seconds": 30.0,
        **said(kind, declares),
    }
    try:
        with Pool(1, with_plugins(settings), 8.0) as pool:
            answer = pool.ask("pasted", home=target, target=target)
    except RefusedError as problem:
        if problem.is_usage:
            raise click.UsageError(str(problem)) from None
        say(f"Error: {problem}", aside=True)
        return 2
    if not answer["source"]:
        say(f"{answer['target']} is known as it stands, a subject of kind {answer['kind']}: veriformer check "
            f"{answer['target']}", aside=True)  # fmt: skip
        return 0
    if out is None:
        say(answer["source"], end="")
    else:
        write_text(out, answer["source"])
        say(f"written: {out}; judge it: veriformer check {out}:mine")
    return 0

"""`veriformer identify`: what an implementation is, as far as calling it shows."""

from __future__ import annotations

import json
from typing import Any

import click
from rich.console import Console
from rich.text import Text
from tabulate import tabulate

from veriformer.cli.options import DEVICE, SEED
from veriformer.cli.plugged import with_plugins
from veriformer.cli.processes.asking import Lost, Pool, RefusedError, Task, warm_up
from veriformer.cli.processes.loading import load_all
from veriformer.cli.saying import said, saying_options
from veriformer.cli.speaking import say, screen
from veriformer.reports.anatomy import tree_of
from veriformer.reports.readable import as_name, cleaned


@click.command()
@click.argument("targets", nargs=-1, required=True, metavar="TARGET...")
@saying_options
@click.option("--device", type=DEVICE, default="cpu", show_default=True, help="cpu or cuda")
@click.option("--seed", type=SEED, default=0, show_default=True)
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
def identify(
    targets: tuple[str, ...], kind: str | None, declares: dict[str, Any], device: str, seed: int, form: str
) -> int:
    """Say what TARGETs are: causal, windowed, where positions and norms stand, their scale, what is coupled.

    What is seen is set beside what is declared; `veriformer check` judges both. Then what flows inside, part by part,
    as the measured numbers tell it. Exit status: 0, or 2 where nothing could be seen.
    """
    warm_up()
    settings = {"profile": "quick", "seed": seed, "device": device, "dtypes": (), "call_seconds": 30.0,
                **said(kind, declares)}  # fmt: skip
    records: list[dict[str, Any]] = []
    try:
        with Pool(1, with_plugins(settings), 8.0) as pool:
            for one in load_all(pool, targets)[0]:
                if one.why is not None:
                    head = {"name": one.target, "kind": "unknown", "target": one.target, "declared": {}}
                    records.append(cleaned({**head, "error": one.why.why, "findings": [], "anatomy": []}))
                for described in one.subjects:
                    pool.run([_task(described, records)])
    except RefusedError as problem:
        if problem.is_usage:
            raise click.UsageError(str(problem)) from None
        say(f"Error: {problem}", aside=True)
        return 2
    if form == "json":
        say(json.dumps(records, indent=1))
    else:
        console = screen()
        for record in records:
            _show(console, record)
    return 0 if records and all(not record["error"] for record in records) else 2


def _task(described: dict[str, Any], records: list[dict[str, Any]]) -> Task:
    head = {"name": as_name(described["name"]), "kind": described["kind"], "target": described["target"]}

    def done(answer: dict[str, Any]) -> None:
        records.append({**head, "declared": cleaned(described["facts"]), **cleaned(answer)})

    def lost(why: Lost) -> None:
        records.append(
            {**head, "declared": cleaned(described["facts"]), "error": cleaned(why.why), "findings": [], "anatomy": []}
        )

    target = described["target"]
    return Task("identify", lambda: {"target": target}, done, lost, [], 120.0, target)


def _show(console: Console, record: dict[str, Any]) -> None:
    console.print(Text(record["name"], style="bold").append(f"  {record['kind']}", style="not bold"))
    if record["error"]:
        console.print(f"  nothing could be seen: {record['error']}")
        return
    rows = []
    for finding in record["findings"]:
        declared = record["declared"].get(finding["name"])
        differs = declared is not None and finding["is_fact"] and declared != finding["value"]
        beside = f"declared {declared!r}" if differs else ("declared" if declared is not None else "")
        rows.append([f"  {finding['name']}", str(finding["value"]), beside, finding["how"]])
    width = max(40, console.width - 75)
    console.print(tabulate(rows, tablefmt="plain", maxcolwidths=[None, None, None, width]))
    if record["anatomy"]:
        console.print(tree_of(record["anatomy"]), soft_wrap=False)

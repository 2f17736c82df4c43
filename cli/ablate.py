"""`veriformer ablate`: train models with parts removed, and say what each part buys."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

UNFINISHED, VIOLATED, INTERRUPTED = 2, 1, 130
CHOSEN = ("studies", "seeds", "device", "tasks", "variants")
"""Settings that `--resume` takes from the last run where the command line names none."""


@click.command()
@click.argument("studies", nargs=-1, metavar="[STUDY...]")
@click.option("--seeds", type=int, default=None, help="of every row  [default: 12]")
@click.option("--device", default=None, help="cpu or cuda  [default: cpu]")
@click.option("--jobs", type=click.IntRange(1), default=None, help="processes  [default: one a core]")
@click.option("--cluster", metavar="ADDRESS", help="tcp://HOST:PORT of a Dask scheduler, or submitit:slurm")
@click.option("--resume", is_flag=True, help="go on with the last run of the folder")
@click.option("--task", "tasks", multiple=True, metavar="NAME", help="these tasks alone")
@click.option("--variant", "variants", multiple=True, metavar="NAME", help="these variants alone, against the base")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=Path(".veriformer/ablations"),
              show_default=True, help="folder of the store and the report")  # fmt: skip
@click.option("--max-memory", default=4.0, show_default=True, metavar="GIB", help="for each stack of seeds")
@click.option("--stack", type=click.IntRange(1), default=None, metavar="N", help="seeds trained together at most")
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option("--list", "lists", is_flag=True, help="name the studies and stop")
def ablate(
    studies: tuple[str, ...],
    seeds: int | None,
    device: str | None,
    jobs: int | None,
    cluster: str | None,
    resume: bool,
    tasks: tuple[str, ...],
    variants: tuple[str, ...],
    out: Path,
    max_memory: float,
    stack: int | None,
    form: str,
    lists: bool,
) -> int:
    """Train small Transformers with one thing changed at a time, and say with statistics what each part buys.

    Without STUDY: positions, residual, norm, warm-up. A finished trial is stored at once and never run twice.
    """
    from veriformer.ablations.execution.executors import open_executor
    from veriformer.ablations.execution.plan import Grouping
    from veriformer.ablations.execution.store import Store, StoreError
    from veriformer.ablations.running import MismatchError, Run
    from veriformer.ablations.verdicts.summary import warnings_before
    from veriformer.clusters.opening import ClusterError
    from veriformer.reports.ablation import write_report

    err = Console(stderr=True, highlight=False, soft_wrap=True)
    if lists:
        return _list(form)
    asked = {"studies": studies, "seeds": seeds, "device": device, "tasks": tasks, "variants": variants}
    path = out / "trials.sqlite"
    try:
        if resume and not path.exists():
            raise click.UsageError(
                f"there is nothing to resume in {out}; run without --resume, or name its folder with --out"
            )
        with Store(path) as store:
            settings = _settings(asked, store.last_settings() if resume else None)
            chosen, measurements = _choose(settings)
            _check_device(settings["device"], cluster)
            grouping = Grouping(settings["device"], max_memory * 2**30, stack)
            run = Run(chosen, measurements, settings["seeds"], grouping, store)
            store.begin(settings)
            for study in chosen:
                for warning in warnings_before(study, settings["seeds"]):
                    err.print(f"[yellow]{warning}[/]")
            processes = jobs or (2 if settings["device"] == "cuda" else os.cpu_count() or 1)
            interrupted, measured = False, {}
            try:
                if run.left:
                    with open_executor(cluster, min(processes, len(run.left)), out / "submitit") as executor:
                        _train(run, executor, ahead=64 if cluster else 2 * processes, err=err)
                measured = {m.name: _measure(m, settings, err) for m in measurements}
            except KeyboardInterrupt:
                interrupted = True
                err.print("interrupted: every finished trial is stored; go on with --resume")
            record = run.record(_command(settings, cluster), measured)
            written = write_report(record, out)
    except (StoreError, ClusterError, MismatchError) as problem:
        raise click.UsageError(str(problem)) from None
    except OSError as problem:
        raise click.UsageError(
            f"the report cannot be written to {out}: {problem.strerror or problem}; name another folder with --out"
        ) from None
    if form == "json":
        click.echo(json.dumps(record, indent=1))
    else:
        show(record)
        click.echo(f"report: {written[0]}")
    return INTERRUPTED if interrupted else status_of(record)


def _settings(asked: dict[str, Any], last: dict[str, Any] | None) -> dict[str, Any]:
    """Return what the run is about: as asked, else as the last run to be resumed, else the defaults."""
    from veriformer.ablations.studies import DEFAULT

    usual = {"studies": DEFAULT, "seeds": 12, "device": "cpu", "tasks": (), "variants": ()}
    before = last or {}
    told = {name: asked[name] if asked[name] not in (None, ()) else before.get(name, usual[name]) for name in CHOSEN}
    if told["seeds"] < 1:
        raise click.UsageError(f"--seeds was {told['seeds']}; at least 1 is required, 12 are the default")
    return {name: list(value) if isinstance(value, tuple) else value for name, value in told.items()}


def _choose(settings: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """Return the studies and the measurements, cut down to the tasks and variants asked for."""
    from veriformer.ablations.studies import MEASUREMENTS, STUDIES

    known = [*STUDIES, *MEASUREMENTS]
    for name in settings["studies"]:
        _must_be_known("study", name, known)
    studies = [STUDIES[name] for name in settings["studies"] if name in STUDIES]
    for task in settings["tasks"]:
        _must_be_known("task", task, dict.fromkeys(t for s in studies for t in s.tasks))
    for variant in settings["variants"]:
        _must_be_known("variant", variant, dict.fromkeys(v.name for s in studies for v in s.variants))
    cut = []
    for study in studies:
        tasks = tuple(t for t in study.tasks if not settings["tasks"] or t in settings["tasks"])
        base, *others = study.variants
        kept = [v for v in others if not settings["variants"] or v.name in settings["variants"]]
        if tasks:
            cut.append(replace(study, tasks=tasks, variants=(base, *kept)))
    return cut, [MEASUREMENTS[name] for name in settings["studies"] if name in MEASUREMENTS]


def _must_be_known(what: str, name: str, known: Iterable[str]) -> None:
    names = list(known)
    if name not in names:
        raise click.UsageError(f"there is no {what} {name!r} here; there are {', '.join(names)}")


def _check_device(device: str, cluster: str | None) -> None:
    import torch

    if device not in ("cpu", "cuda"):
        raise click.UsageError(f"--device was {device!r}; it must be cpu or cuda")
    if device == "cuda" and cluster is None and not torch.cuda.is_available():
        raise click.UsageError(
            "--device was cuda, and this machine has no CUDA device that torch can use; give --device cpu"
        )


def _progress(err: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[failed]}"),
        TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
        console=err, transient=True, disable=not err.is_terminal,
    )  # fmt: skip


def _train(run: Any, executor: Any, ahead: int, err: Console) -> None:
    """Train what is left, with trials done, failed and the time left on the screen."""
    stored = run.trials - sum(len(job.trials) for job in run.left)
    if stored:
        err.print(f"{stored} of {run.trials} trials are in the store already")
    with _progress(err) as progress:
        bar = progress.add_task("training", total=run.trials - stored, failed="")
        for job, _ in run.advance(executor, ahead):
            failed = sum(run.failures.values())
            progress.update(bar, advance=len(job.trials), failed=f"{failed} failed" if failed else "")
    for reason, count in run.failures.items():
        err.print(f"{count} trials failed: {reason}", markup=False)


def _measure(measurement: Any, settings: dict[str, Any], err: Console) -> list[dict[str, Any]]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with _progress(err) as progress:
            total = measurement.count(settings["device"])
            return list(
                progress.track(
                    measurement.points(settings["device"], settings["seeds"]),
                    task_id=progress.add_task(measurement.name, total=total, failed=""), total=total,
                )
            )  # fmt: skip
    finally:
        torch.set_num_threads(before)


def _command(settings: dict[str, Any], cluster: str | None) -> str:
    """Return the command that gives the same numbers; where they are stored and how many work is left out."""
    words = ["veriformer", "ablate", *settings["studies"], "--seeds", str(settings["seeds"])]
    if settings["device"] != "cpu":
        words += ["--device", settings["device"]]
    for name in ("task", "variant"):
        for value in settings[f"{name}s"]:
            words += [f"--{name}", value]
    if cluster is not None:
        words += ["--cluster", "..."]
    return shlex.join(words)


def show(record: dict[str, Any]) -> None:
    """Print every study's table with what was predicted and what is certain."""
    from veriformer.reports.ablation_tables import noise_line, table, theorems
    from veriformer.reports.figure_style import provenance
    from veriformer.reports.measurement_figures import lines

    for study in record["studies"]:
        click.echo(f"\n{study['name']}: {study['question']}")
        if study["rows"]:
            click.echo(noise_line(study))
            click.echo(table(study, "simple", whole=False))
        for line in [*theorems(study), *lines(study)]:
            click.echo(line)
        if study["missing"]:
            click.echo(f"{study['missing']} trials are missing; rows without all of their seeds are not shown")
    click.echo(f"\n{provenance(record)}")
    told = [p["outcome"] for s in record["studies"] for r in s["rows"] for p in r["predictions"]]
    if told:
        counts = ", ".join(f"{told.count(o)} {o}" for o in ("confirmed", "contradicted", "undecided"))
        click.echo(f"predictions: {counts}")


def status_of(record: dict[str, Any]) -> int:
    """Return 1 when a theorem does not hold on a trained model, 2 when trials are missing, else 0."""
    rows = [row for study in record["studies"] for row in study["rows"]]
    if any(not check["holds"] for row in rows for check in row["checks"].values()):
        return VIOLATED
    return UNFINISHED if record["trials"]["missing"] else 0


def _list(form: str) -> int:
    from veriformer.ablations.studies import DEFAULT, MEASUREMENTS, STUDIES

    known: list[Any] = [*STUDIES.values(), *MEASUREMENTS.values()]
    told = [{"name": s.name, "question": s.question, "default": s.name in DEFAULT} for s in known]
    if form == "json":
        click.echo(json.dumps(told, indent=1))
    else:
        for study in told:
            click.echo(f"{'*' if study['default'] else ' '} {study['name']:<18} {study['question']}")
        click.echo("* run by `veriformer ablate` without an argument")
    return 0

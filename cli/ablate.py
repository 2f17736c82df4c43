"""`veriformer ablate`: train models with parts removed, and say what each part buys."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from veriformer.cli.options import FOLDER, PROCESSES, Amount
from veriformer.cli.reading import shown
from veriformer.cli.speaking import Unwritten, say, screen
from veriformer.reports.readable import cleaned

UNFINISHED, VIOLATED, INTERRUPTED = 2, 1, 130
MOST_SEEDS = 10_000
_WORDS: Callable[[Any], bool] = lambda v: isinstance(v, list) and all(isinstance(word, str) for word in v)  # noqa: E731
_CHOSEN: dict[str, Callable[[Any], bool]] = {
    "studies": _WORDS,
    "tasks": _WORDS,
    "variants": _WORDS,
    "seeds": lambda v: type(v) is int and 1 <= v <= MOST_SEEDS,
    "device": lambda v: v in ("cpu", "cuda"),
    "max_memory": lambda v: type(v) in (int, float) and 0 < v <= 2**20,
    "stack": lambda v: v is None or (type(v) is int and v >= 1),
}
"""What determines the trials of a run, and what it must be; `--resume` takes what the command line leaves open from the
last run: seeds that are trained together belong to a trial, and so do the options that say which these are."""


@click.command()
@click.argument("studies", nargs=-1, metavar="[STUDY...]")
@click.option("--seeds", type=int, default=None, help="of every row  [default: 12]")
@click.option("--device", default=None, help="cpu or cuda  [default: cpu]")
@click.option("--jobs", type=PROCESSES, default=None, help="processes  [default: one a core]")
@click.option("--cluster", metavar="ADDRESS", help="tcp://HOST:PORT of a Dask scheduler, or submitit:slurm")
@click.option("--resume", is_flag=True, help="go on with the last run of the folder")
@click.option("--task", "tasks", multiple=True, metavar="NAME", help="these tasks alone")
@click.option("--variant", "variants", multiple=True, metavar="NAME", help="these variants alone, against the base")
@click.option("--out", type=FOLDER, default=Path(".veriformer/ablations"),
              show_default=True, help="folder of the store and the report")  # fmt: skip
@click.option(
    "--max-memory", type=Amount(2**20), default=None, metavar="GIB", help="for each stack of seeds  [default: 4]"
)
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
    max_memory: float | None,
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

    err = screen(aside=True)
    if lists:
        return _list(form)
    asked = {"studies": studies, "seeds": seeds, "device": device, "tasks": tasks, "variants": variants,
             "max_memory": max_memory, "stack": stack}  # fmt: skip
    path = out / "trials.sqlite"
    try:
        if resume and not path.exists():
            raise click.UsageError(
                f"there is nothing to resume in {out}; run without --resume, or name its folder with --out"
            )
        with Store(path) as store:
            settings = _settings(asked, store.last_settings() if resume else None, path)
            chosen, measurements = _choose(settings)
            _check_device(settings["device"], cluster)
            if resume:
                err.print(f"going on with: {_command(settings, cluster)}")
            grouping = Grouping(settings["device"], settings["max_memory"] * 2**30, settings["stack"])
            run = Run(chosen, measurements, settings["seeds"], grouping, store)
            store.begin(settings)
            for study in chosen:
                for warning in warnings_before(study, settings["seeds"]):
                    err.print(warning, style="yellow")
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
            record = cleaned(run.record(_command(settings, cluster), measured))
    except (StoreError, ClusterError, MismatchError) as problem:
        raise click.UsageError(str(problem)) from None
    unwritten = Unwritten()
    with unwritten.attempt("the report"):
        write_report(record, out)
    if form == "json":
        say(json.dumps(record, indent=1))
    else:
        show(record)
        if not unwritten.count:
            say(f"report: {out / 'index.html'}")
    return INTERRUPTED if interrupted else unwritten.status(status_of(record))


def _settings(asked: dict[str, Any], last: dict[str, Any] | None, path: Path) -> dict[str, Any]:
    """Return what the run is about: as asked, else as the last run of the store to be resumed, else the defaults."""
    from veriformer.ablations.execution.store import StoreError
    from veriformer.ablations.studies import DEFAULT

    usual = {"studies": list(DEFAULT), "seeds": 12, "device": "cpu", "tasks": [], "variants": [], "max_memory": 4.0,
             "stack": None}  # fmt: skip
    before = {**usual, **(last or {})}
    for name, is_sound in _CHOSEN.items():
        if not is_sound(before[name]):
            raise StoreError(
                f"{path} is damaged: the {name} of its last run are {shown(before[name])}; run without --resume"
            )
    told = {name: before[name] if asked[name] in (None, ()) else asked[name] for name in _CHOSEN}
    if not 1 <= told["seeds"] <= MOST_SEEDS:
        raise click.UsageError(
            f"--seeds was {told['seeds']}; at least 1 is required, 12 are the default, {MOST_SEEDS} the most"
        )
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
        TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(),
        TextColumn("{task.fields[failed]}"),
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
        err.print(f"{count} trials failed: {reason}")


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
    if settings["max_memory"] != 4.0:
        words += ["--max-memory", f"{settings['max_memory']:g}"]
    if settings["stack"] is not None:
        words += ["--stack", str(settings["stack"])]
    if cluster is not None:
        words += ["--cluster", "..."]
    return shlex.join(words)


def show(record: dict[str, Any]) -> None:
    """Print every study's table with what was predicted and what is certain."""
    from veriformer.reports.ablation_tables import noise_line, table, theorems
    from veriformer.reports.figure_style import provenance
    from veriformer.reports.measurement_figures import lines

    for study in record["studies"]:
        say(f"\n{study['name']}: {study['question']}")
        if study["rows"]:
            say(noise_line(study))
            say(table(study, "simple", whole=False))
        for line in [*theorems(study), *lines(study)]:
            say(line)
        if study["missing"]:
            say(f"{study['missing']} trials are missing; rows without all of their seeds are not shown")
    say(f"\n{provenance(record)}")
    told = [p["outcome"] for s in record["studies"] for r in s["rows"] for p in r["predictions"]]
    if told:
        counts = ", ".join(f"{told.count(o)} {o}" for o in ("confirmed", "contradicted", "undecided"))
        say(f"predictions: {counts}")


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
        say(json.dumps(told, indent=1))
    else:
        for study in told:
            say(f"{'*' if study['default'] else ' '} {study['name']:<18} {study['question']}")
        say("* run by `veriformer ablate` without an argument")
    return 0

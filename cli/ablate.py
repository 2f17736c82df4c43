"""`veriformer ablate`: train models with parts removed, and say what each part buys."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from veriformer.cli.extras import insist_on
from veriformer.cli.index import studies as known_studies
from veriformer.cli.options import FOLDER, PROCESSES, Amount
from veriformer.cli.plugged import plugged
from veriformer.cli.reading import shown
from veriformer.cli.speaking import Unwritten, say, screen
from veriformer.reports.readable import cleaned

UNFINISHED, VIOLATED, INTERRUPTED = 2, 1, 130
MOST_SEEDS, SEEDS = 10_000, 12
LAST_FIRST_SEED = 2**31
_WORDS: Callable[[Any], bool] = lambda v: isinstance(v, list) and all(isinstance(word, str) for word in v)  # noqa: E731
_CHOSEN: dict[str, Callable[[Any], bool]] = {
    "studies": _WORDS,
    "tasks": _WORDS,
    "variants": _WORDS,
    "seeds": lambda v: v is None or (type(v) is int and 1 <= v <= MOST_SEEDS),
    "first_seed": lambda v: type(v) is int and 0 <= v <= LAST_FIRST_SEED,
    "device": lambda v: v in ("cpu", "cuda"),
    "max_memory": lambda v: type(v) in (int, float) and 0 < v <= 2**20,
    "stack": lambda v: v is None or (type(v) is int and v >= 1),
}
"""What determines the trials of a run, and what it must be; `--resume` takes what the command line leaves open from the
last run: seeds that are trained together belong to a trial, and so do the options that say which these are."""


@click.command()
@click.argument("studies", nargs=-1, metavar="[STUDY...]")
@click.option("--seeds", type=int, default=None, help="of every row  [default: 24 in the table, 12 in a study]")
@click.option(
    "--first-seed",
    type=click.IntRange(0, LAST_FIRST_SEED),
    default=None,
    metavar="N",
    help="those below 2000 are for tuning  [default: 2000]",
)
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
    first_seed: int | None,
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

    Without STUDY: the table, a Transformer without positions, residual connections, LayerNorm, each pair and all three,
    at the best and the worst of one sweep. Of your own model: path/file.py:study, a Study of veriformer.ablations. A
    finished trial is stored at once and never run twice, unless the code has changed.
    """
    if lists:
        return _list(form)
    insist_on("ablate", "veriformer ablate")
    from veriformer.ablations.execution.executors import open_executor
    from veriformer.ablations.execution.plan import Grouping
    from veriformer.ablations.execution.store import Store, StoreError
    from veriformer.ablations.running import MismatchError, Run
    from veriformer.ablations.table.telling import warnings_before as warnings_of_table
    from veriformer.ablations.verdicts.summary import warnings_before
    from veriformer.clusters.opening import ClusterError
    from veriformer.reports.ablation import write_report

    err = screen(aside=True)
    asked = {"studies": studies, "seeds": seeds, "first_seed": first_seed, "device": device, "tasks": tasks,
             "variants": variants, "max_memory": max_memory, "stack": stack}  # fmt: skip
    path = out / "trials.sqlite"
    try:
        if resume and not path.exists():
            raise click.UsageError(
                f"there is nothing to resume in {out}; run without --resume, or name its folder with --out"
            )
        with Store(path) as store:
            settings = _settings(asked, store.last_settings() if resume else None, path)
            chosen, measurements, design = _choose(settings)
            _check_device(settings["device"], cluster)
            if resume:
                err.print(f"going on with: {_command(settings, cluster)}")
            grouping = Grouping(
                settings["device"], settings["max_memory"] * 2**30, settings["stack"], settings["first_seed"]
            )
            seeds = settings["seeds"] or SEEDS
            run = Run(chosen, measurements, seeds, grouping, store, design=design, work=_work(chosen))
            store.begin(settings)
            told = warnings_of_table(design) if design else []
            for warning in (*told, *(line for study in chosen for line in warnings_before(study, seeds))):
                err.print(warning, style="yellow")
            processes = jobs or (2 if settings["device"] == "cuda" else os.cpu_count() or 1)
            interrupted, measured = False, {}
            try:
                if run.left:
                    with open_executor(cluster, min(processes, len(run.left)), out / "submitit") as executor:
                        _train(run, executor, ahead=64 if cluster else 2 * processes, err=err)
                measured = {m.name: _measure(m, settings["device"], seeds, err) for m in measurements}
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
    from veriformer.ablations.execution.plan import FIRST_SEED
    from veriformer.ablations.execution.store import StoreError
    from veriformer.ablations.studies import DEFAULT

    usual = {"studies": list(DEFAULT), "seeds": None, "first_seed": FIRST_SEED, "device": "cpu", "tasks": [],
             "variants": [], "max_memory": 4.0, "stack": None}  # fmt: skip
    before = {**usual, **(last or {})}
    for name, is_sound in _CHOSEN.items():
        if not is_sound(before[name]):
            raise StoreError(
                f"{path} is damaged: the {name} of its last run are {shown(before[name])}; run without --resume"
            )
    told = {name: before[name] if asked[name] in (None, ()) else asked[name] for name in _CHOSEN}
    if told["seeds"] is not None and not 1 <= told["seeds"] <= MOST_SEEDS:
        raise click.UsageError(
            f"--seeds was {told['seeds']}; at least 1 is required, {SEEDS} are the default, {MOST_SEEDS} the most"
        )
    return {name: list(value) if isinstance(value, tuple) else value for name, value in told.items()}


def _choose(settings: dict[str, Any]) -> tuple[list[Any], list[Any], Any]:
    """Return the studies, the measurements and the table's design, cut down to the tasks and variants asked for."""
    from veriformer.ablations.execution.plan import FIRST_SEED
    from veriformer.ablations.studies import MEASUREMENTS, STUDIES, TABLE
    from veriformer.ablations.table.design import Design
    from veriformer.cli.own_studies import is_target, load_studies

    known = [TABLE, *STUDIES, *MEASUREMENTS]
    studies = []
    others = plugged().studies if any(not is_target(n) and n not in known for n in settings["studies"]) else {}
    known += others
    for name in settings["studies"]:
        if is_target(name) or name in others:
            studies += load_studies(others[name]["target"] if name in others else name)
            continue
        _must_be_known("study", name, known)
        studies += [STUDIES[name]] if name in STUDIES else []
    for name in (names := [s.name for s in studies]):
        if names.count(name) > 1:
            raise click.UsageError(f"two studies are called {name!r}; run them one after the other, or rename one")
    asked = settings.get("seeds")
    seeds = {"seeds": asked, "control_seeds": asked} if asked else {}
    design = (
        Design(**seeds, first_seed=settings.get("first_seed", FIRST_SEED)) if TABLE in settings["studies"] else None
    )
    tabled = (list(design.tasks), ["+".join(r) for r in design.removed if r]) if design else ([], [])
    for task in settings["tasks"]:
        _must_be_known("task", task, dict.fromkeys([*tabled[0], *(t for s in studies for t in s.tasks)]))
    for variant in settings["variants"]:
        _must_be_known("variant", variant, dict.fromkeys([*tabled[1], *(v.name for s in studies for v in s.variants)]))
    if design is not None:
        design = design.cut(settings["tasks"], settings["variants"])
    cut = [part for s in studies if (part := s.cut(settings["tasks"], settings["variants"])) is not None]
    return cut, [MEASUREMENTS[name] for name in settings["studies"] if name in MEASUREMENTS], design


def _work(studies: list[Any]) -> Callable[..., dict[str, Any]]:
    """Return what a worker does with a job: train it; where a study is the user's own, load that first."""
    from veriformer.ablations.execution.work import train_job
    from veriformer.cli.own_studies import train

    return train if any(study.code for study in studies) else train_job


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
    stored = run.done
    if stored:
        err.print(f"{stored} of {run.trials} trials are in the store already")
    with _progress(err) as progress:
        bar = progress.add_task("training", total=run.trials - stored, failed="")
        for job, _ in run.advance(executor, ahead):
            failed = sum(run.failures.values())
            progress.update(bar, advance=len(job.trials), failed=f"{failed} failed" if failed else "")
    for reason, count in run.failures.items():
        seeds, frames = run.faults.get(reason, ((), ""))
        of = f" (seed{'s' * (len(seeds) > 1)} {', '.join(map(str, sorted(seeds)))})" if seeds else ""
        err.print(f"{count} trial{'s' * (count > 1)} failed: {reason}{of}", markup=False, highlight=False)
        if frames:
            err.print(frames, markup=False, highlight=False)


def _measure(measurement: Any, device: str, seeds: int, err: Console) -> list[dict[str, Any]]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with _progress(err) as progress:
            total = measurement.count(device)
            return list(
                progress.track(
                    measurement.points(device, seeds),
                    task_id=progress.add_task(measurement.name, total=total, failed=""), total=total,
                )
            )  # fmt: skip
    finally:
        torch.set_num_threads(before)


def _command(settings: dict[str, Any], cluster: str | None) -> str:
    """Return the command that gives the same numbers; where they are stored and how many work is left out."""
    from veriformer.ablations.execution.plan import FIRST_SEED

    words = ["veriformer", "ablate", *settings["studies"]]
    if settings["seeds"] is not None:
        words += ["--seeds", str(settings["seeds"])]
    if settings["first_seed"] != FIRST_SEED:
        words += ["--first-seed", str(settings["first_seed"])]
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
    from veriformer.reports.ablation_parts import told_on_a_screen
    from veriformer.reports.ablation_tables import counts_of, family_line, noise_line, outcomes_of, table, theorems
    from veriformer.reports.figure_style import provenance
    from veriformer.reports.measurement_figures import lines

    if record.get("table"):
        for line in told_on_a_screen(record["table"]):
            say(line)
    for study in record["studies"]:
        say(f"\n{study['name']}: {study['question']}" if study["question"] else f"\n{study['name']}")
        for note in study.get("notes", ()):
            say(note)
        if study["rows"]:
            say(f"{noise_line(study)}; {family_line(study)}")
            say(table(study, "simple", whole=False))
        for line in [*theorems(study), *lines(study)]:
            say(line)
        if study["missing"]:
            say(f"{study['missing']} trials are missing; rows without all of their seeds are not shown")
    say(f"\n{provenance(record)}")
    if told := outcomes_of(record):
        say(f"predictions: {counts_of(told)}")


def status_of(record: dict[str, Any]) -> int:
    """Return 1 when a theorem does not hold on a trained model, 2 when trials are missing, else 0."""
    rows = [row for study in record["studies"] for row in study["rows"]]
    rows += [line for row in (record.get("table") or {"rows": []})["rows"] for line in row["devices"].values()]
    if any(not check["holds"] for row in rows for check in row["checks"].values()):
        return VIOLATED
    return UNFINISHED if record["trials"]["missing"] else 0


def _list(form: str) -> int:
    told = [*known_studies(), *plugged().studies.values()]
    if form == "json":
        say(json.dumps(told, indent=1))
    else:
        for study in told:
            origin = f" [{study['origin']}]" if "origin" in study else ""
            say(f"{'*' if study['default'] else ' '} {study['name']:<18} {study['question']}{origin}")
        say("* run by `veriformer ablate` without an argument")
    return 0

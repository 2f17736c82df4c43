"""`veriformer sweep`: every known model of the installed libraries, judged by every property that applies."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from veriformer.cli.cluster import cluster_option, workers_of
from veriformer.cli.deviating import DeviationsFile, deviation_options
from veriformer.cli.options import FOLDER, GIBIBYTES, PROCESSES, SECONDS, SEED
from veriformer.cli.plugged import plugged, with_plugins
from veriformer.cli.processes.apart import Apart, Call
from veriformer.cli.processes.asking import NO_ANSWER, Judges, Pool, RefusedError
from veriformer.cli.processes.elsewhere import PoolElsewhere
from veriformer.cli.processes.judged_store import JudgedStore, fingerprint
from veriformer.cli.processes.loading import load_all
from veriformer.cli.processes.sweeping import modules_of, row_of
from veriformer.cli.running import Run
from veriformer.cli.speaking import Unwritten, say, screen
from veriformer.properties.bench.profiles import PROFILES
from veriformer.properties.known.deviations import DeviationsError
from veriformer.properties.results.reading import subject_of
from veriformer.properties.results.records import Report, SubjectReport, plain
from veriformer.reports.compliance import compliance, print_compliance, write_compliance
from veriformer.reports.formats import stable as without_changing
from veriformer.reports.readable import cleaned
from veriformer.reports.records import write_json
from veriformer.reports.schema import is_subject


@click.command()
@click.argument("libraries", nargs=-1, metavar="[LIBRARY[:NAME]...]")
@click.option("--level", type=click.Choice(["core", "all"]), default="all", show_default=True)
@click.option("--profile", type=click.Choice(list(PROFILES)), default="quick", show_default=True)
@click.option("--seed", type=SEED, default=0, show_default=True)
@click.option("-n", "workers", type=PROCESSES, default=None, help="processes; default: cores, at most 4")
@cluster_option
@deviation_options
@click.option(
    "--out",
    type=FOLDER,
    default=Path(".veriformer/sweep"),
    show_default=True,
    help="folder for report.json and compliance.md, .html, .csv; a second run goes on",
)
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option("--stable", is_flag=True, help="leave out what changes from run to run: times, the machine")
@click.option("--fresh", is_flag=True, help="judge again what an earlier run has judged")
@click.option("--model-seconds", type=SECONDS, default=180.0, show_default=True, help="limit for one model")
@click.option("--max-memory", type=GIBIBYTES, default=8.0, show_default=True, metavar="GIB", help="for each process")
def sweep(
    libraries: tuple[str, ...],
    level: str,
    profile: str,
    seed: int,
    workers: int | None,
    cluster: str | None,
    deviations_file: Path | None,
    update_deviations: bool,
    reason: str | None,
    prune: bool,
    out: Path,
    form: str,
    stable: bool,
    fresh: bool,
    model_seconds: float,
    max_memory: float,
) -> int:
    """Judge all models of LIBRARIES (default: every installed one), each in a process of its own, and table them.

    Exit status: 0 nothing fails that is not a declared deviation, 1 something does, 2 nothing could be judged, 3 usage.
    """
    from veriformer import properties, reference

    err = screen(aside=True)
    deviations = DeviationsFile(deviations_file, update=update_deviations, prune=prune, reason=reason)
    started = time.perf_counter()
    settings = {"profile": profile, "seed": seed, "device": "cpu", "dtypes": (), "call_seconds": 30.0, "named": ()}
    settings, added = with_plugins(settings), plugged()
    os.environ.setdefault("KERAS_BACKEND", "torch")  # other libraries import keras, before its adapter could say so
    judges: Judges = Pool(workers or min(os.cpu_count() or 1, 4), settings, max_memory)
    if cluster is not None:
        there = workers_of(cluster, workers, seconds=model_seconds, max_memory=max_memory, folder=out)
        judges = PoolElsewhere(there, settings, max_memory)
    rows: dict[str, dict[str, Any]] = {}
    targets: list[str] = []
    interrupted, unwritten, report = False, Unwritten(), Report([], seed, profile)
    with judges:
        way = Apart(judges, "models", model_seconds)
        try:
            targets, report.versions = _targets(libraries, way, err)
            versions = sorted(report.versions.items())
            key = f"{level} {profile} {seed} {versions} {fingerprint((properties, reference))}{added.code}"
            store = JudgedStore(out / "judged.jsonl", key)
            rows |= {} if fresh else {t: row for t, row in store.read().items() if t in targets and _is_whole(row)}
            if rows:
                told = f"{len(rows)} of {len(targets)} models were judged before ({store.path})"
                err.print(f"{told}; --fresh judges them again")

            for target, row in _judged([t for t in targets if t not in rows], way, level, profile, seed, err):
                rows[target] = cleaned(row)
                with unwritten.attempt(f"the row of {target}", asked=False):
                    store.append(target, rows[target])
            report.subjects += _subjects(targets, rows)
            if report.subjects:
                kinds = sorted({s.kind for s in report.subjects})
                call = Call("veriformer.cli.processes.sweeping:judge_canaries", (kinds, level, profile, seed))
                for ended in way.run({"canaries": call}, err):
                    report.canaries = ended.row or {"sent": 1, "caught": 0, "missed": [ended.why]}
        except KeyboardInterrupt:
            err.print("interrupted: what follows is what was known by then; the same command goes on from there")
            interrupted = True
            report.subjects = _subjects(targets, rows)
    report.seconds = time.perf_counter() - started
    if not interrupted:
        with unwritten.attempt("the deviations file", DeviationsError):
            deviations.settle(report, err)
    record = cleaned(report.to_json())
    unbuilt = {t: rows[t]["error"] for t in targets if t in rows and not rows[t]["subject"]}
    record["not_judged"] = unbuilt
    record = without_changing(record) if stable else record
    table = compliance(record)
    with unwritten.attempt("the report"):
        write_json(out / "report.json", record)
        write_compliance(table, out)
    if form == "json":
        say(json.dumps(record, indent=1))
    else:
        print_compliance(screen(), table)
        if not unwritten.count:
            say(f"written: {out / 'report.json'}, compliance.md, compliance.html, compliance.csv")
    return 130 if interrupted else unwritten.status(report.exit_status)


def _subjects(targets: Iterable[str], rows: Mapping[str, dict[str, Any]]) -> list[SubjectReport]:
    return [subject_of(rows[t]["subject"]) for t in targets if t in rows and rows[t]["subject"]]


def _judged(
    targets: Sequence[str], way: Apart, level: str, profile: str, seed: int, err: Console
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the row of each target; one that ended its process is judged again as `check` does, row by row.

    So what ends its process at one property has all the other rows, and one that always does is given up.
    """
    judging, falling = "veriformer.cli.processes.sweeping:judge_target", list[str]()
    calls = {t: Call(judging, (t, level, profile, seed), modules_of(_library_of(t))) for t in targets}
    for ended in way.run(calls, err):
        if ended.lost is not None and ended.lost.fell:
            falling.append(ended.name)
            continue
        row = ended.row or {"subject": None, "error": ended.why}
        if not _is_whole(row):
            row = {"subject": None, "error": f"{NO_ANSWER} while it was judged"}
        if row["subject"]:
            row["subject"]["printed"] = ended.printed
        yield ended.name, row
    for target in falling:
        yield target, _judged_by_rows(target, way, level, profile, seed, err)


def _judged_by_rows(target: str, way: Apart, level: str, profile: str, seed: int, err: Console) -> dict[str, Any]:
    run = Run(profile, seed, "cpu")
    try:
        chosen = way.judges.ask("select", only=(), exclude=(), level=level)
        loaded, _ = load_all(way.judges, [target], [p["id"] for p in chosen["properties"]])
        run.judge(way.judges, chosen, loaded, err, with_canaries=False)
    except RefusedError as problem:
        return {"subject": None, "error": str(problem)}
    (part,) = run.report.subjects
    return row_of(plain(part))


def _is_whole(row: object) -> bool:
    """Whether a row is what judging a model gives; a stored one that is not counts as not judged."""
    if not isinstance(row, dict) or not isinstance(row.get("error"), str):
        return False
    return row.get("subject", "") is None or is_subject(row.get("subject"))


def _targets(libraries: tuple[str, ...], way: Apart, err: Console) -> tuple[list[str], dict[str, str]]:
    """Return the targets that are meant, and the releases of their libraries; libraries are imported in processes."""
    from veriformer.properties.adapters.libraries import LIBRARIES
    from veriformer.properties.adapters.target import Target

    named = {str(Target.parse(word)): library for word in libraries if (library := _library_of(word))}
    libraries = tuple(named)  # `torch:` is torch
    wanted = [w for w in libraries if w in LIBRARIES] if libraries else list(LIBRARIES)
    single = [w for w in libraries if w not in LIBRARIES]
    found: dict[str, list[str]] = {}
    versions: dict[str, str] = {}
    asked = dict.fromkeys([*wanted, *(named[w] for w in single)])
    names_of = "veriformer.cli.processes.sweeping:names_of"
    for ended in way.run({w: Call(names_of, (w,), modules_of(w)) for w in asked}, err):
        library, answer = ended.name, ended.row
        why = ended.why or (answer or {}).get("error", "")
        if why and library in libraries:
            raise click.UsageError(why)
        if why:
            err.print(f"left out: {why}", style="yellow")
            continue
        found[library] = [f"{library}:{name}" for name in (answer or {})["names"]]
        versions |= (answer or {})["versions"]
    targets = [t for library in wanted for t in found.get(library, ())]
    return list(dict.fromkeys([*targets, *single])), versions


def _library_of(word: str) -> str:
    """Return the library that a word of the command line names, whole or one subject of it."""
    from veriformer.properties.adapters.libraries import LIBRARIES
    from veriformer.properties.adapters.target import LIBRARY, Target, TargetError

    with contextlib.suppress(TargetError):
        target = Target.parse(word)
        if target.kind == LIBRARY:
            return target.place
    raise click.UsageError(f"there is no library {word!r}; the libraries are: {', '.join(LIBRARIES)}")

"""`veriformer sweep`: every known model of the installed libraries, judged by every property that applies."""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from veriformer.cli.cluster import cluster_option, workers_of
from veriformer.cli.deviating import DeviationsFile, deviation_options
from veriformer.cli.options import FOLDER, GIBIBYTES, PROCESSES, SECONDS, SEED
from veriformer.cli.processes.apart import Apart, Call
from veriformer.cli.processes.elsewhere import ApartElsewhere
from veriformer.cli.processes.judged_store import JudgedStore, fingerprint
from veriformer.cli.speaking import Unwritten, say, screen
from veriformer.properties.bench.profiles import PROFILES
from veriformer.properties.known.deviations import DeviationsError
from veriformer.properties.results.reading import subject_of
from veriformer.properties.results.records import Report
from veriformer.reports.compliance import compliance, print_compliance, write_compliance
from veriformer.reports.formats import stable as without_changing
from veriformer.reports.readable import cleaned
from veriformer.reports.records import RecordError, write_json
from veriformer.reports.schema import insist

_SHARED_PROCESS = 25  # models that share a process, so that a library is not imported anew for each


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
    deviations = DeviationsFile(
        deviations_file, update=update_deviations, prune=prune, reason=reason, is_whole=level == "all"
    )
    started = time.perf_counter()
    size = workers or min(os.cpu_count() or 1, 4)
    way: Apart | ApartElsewhere = Apart("models", size, model_seconds, tasks_a_process=_SHARED_PROCESS)
    if cluster is not None:
        there = workers_of(cluster, workers, seconds=model_seconds, max_memory=max_memory, folder=out)
        way = ApartElsewhere(there, "models", model_seconds, tasks_a_process=_SHARED_PROCESS)
    targets, versions = _targets(libraries, way, err)
    key = f"{level} {profile} {seed} {sorted(versions.items())} {fingerprint((properties, reference))}"
    store = JudgedStore(out / "judged.jsonl", key)
    rows = {} if fresh else {t: row for t, row in store.read().items() if t in targets and _is_whole(row)}
    if rows:
        err.print(f"{len(rows)} of {len(targets)} models were judged before ({store.path}); --fresh judges them again")
    interrupted, unwritten = False, Unwritten()
    from veriformer.cli.processes.sweeping import judge_canaries, judge_target

    def judged(target: str, row: dict[str, Any] | None, told: str) -> None:
        rows[target] = cleaned(row or {"subject": None, "error": told})
        with unwritten.attempt(f"the row of {target}", asked=False):
            store.append(target, rows[target])

    try:
        calls: dict[str, Call] = {
            t: (judge_target, (t, level, profile, seed, max_memory)) for t in targets if t not in rows
        }
        suspects: dict[str, Call] = {}
        for target, row, told in way.run(calls, err):
            if _may_be_a_neighbour(row, told):
                suspects[target] = calls[target]
            else:
                judged(target, row, told)
        for target, row, told in replace(way, tasks_a_process=1).run(suspects, err):
            judged(target, row, told)
    except KeyboardInterrupt:
        err.print("interrupted: what follows is what was known by then; the same command goes on from there")
        interrupted = True
    report = Report([], seed, profile)
    report.versions |= versions
    report.subjects += [subject_of(rows[t]["subject"]) for t in targets if t in rows and rows[t]["subject"]]
    if report.subjects and not interrupted:
        kinds = sorted({s.kind for s in report.subjects})
        for _, answer, told in way.run({"canaries": (judge_canaries, (kinds, level, profile, seed))}, err):
            report.canaries = answer or {"sent": 1, "caught": 0, "missed": [told]}
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


def _is_whole(row: object) -> bool:
    """Whether a stored row is what a sweep writes; any other counts as not judged."""
    subject = row.get("subject") if isinstance(row, dict) else row
    try:
        if subject is not None:
            held = {"versions": {}, "seed": 0, "profile": "quick", "device": "cpu", "subjects": [subject]}
            insist({"schema": "veriformer-report/1", **held}, "a stored row")
        return isinstance(row, dict) and isinstance(row["error"], str)
    except (RecordError, KeyError, RecursionError):
        return False


def _may_be_a_neighbour(row: dict[str, Any] | None, told: str) -> bool:
    """Whether a model that ran in the same process before may be to blame; it is judged again, alone, then."""
    why = told or (row or {}).get("error", "")
    return any(word in why for word in ("process ended", "memory", "bad_alloc", "MemoryError"))


def _targets(libraries: tuple[str, ...], way: Apart | ApartElsewhere, err: Console) -> tuple[list[str], dict[str, str]]:
    """Return the targets that are meant, and the releases of their libraries; libraries are imported in processes."""
    from veriformer.cli.processes.sweeping import names_of
    from veriformer.properties.adapters.libraries import LIBRARIES

    named = {word: _library_of(word) for word in libraries}
    wanted = [w for w in libraries if w in LIBRARIES] if libraries else list(LIBRARIES)
    single = [w for w in libraries if w not in LIBRARIES]
    found: dict[str, list[str]] = {}
    versions: dict[str, str] = {}
    asked = dict.fromkeys([*wanted, *(named[w] for w in single)])
    for library, answer, told in way.run({w: (names_of, (w,)) for w in asked}, err):
        why = told or (answer or {}).get("error", "")
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

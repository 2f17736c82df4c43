"""`veriformer check`: judge implementations."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from veriformer.cli.cluster import cluster_option, workers_of
from veriformer.cli.deviating import DeviationsFile, deviation_options
from veriformer.cli.options import DEVICE, FOLDER, GIBIBYTES, PROCESSES, SECONDS, SEED
from veriformer.cli.processes.asking import Judges, Lost, Pool, RefusedError, Task, warm_up
from veriformer.cli.processes.elsewhere import PoolElsewhere
from veriformer.cli.processes.loading import Loaded, load_all
from veriformer.cli.processes.printed import Printed
from veriformer.cli.recorded import CASES, how_to_repeat, write_cases
from veriformer.cli.speaking import Unwritten, say, screen
from veriformer.cli.unjudged import print_unjudged
from veriformer.clusters.opening import ClusterError
from veriformer.properties.bench.profiles import PROFILES, most_seconds
from veriformer.properties.known.deviations import DeviationsError
from veriformer.properties.results.reading import result_of
from veriformer.properties.results.records import LOADS, Report, Result, SubjectReport, plain, reach_of, unreached_of
from veriformer.reports.formats import FORMATS, write_all
from veriformer.reports.formats import stable as without_changing
from veriformer.reports.readable import cleaned, readable
from veriformer.reports.terminal import print_failure, print_report
from veriformer.reports.verdicts import shown_in_full, told_by

NOTHING_JUDGED = 2
DTYPES = ("float64", "float32", "bfloat16", "float16")


@click.command()
@click.argument("targets", nargs=-1, required=True, metavar="TARGET...")
@click.option("--only", multiple=True, metavar="ID", help="judge these properties or families alone")
@click.option("--exclude", multiple=True, metavar="ID", help="leave these properties or families out")
@click.option("--level", type=click.Choice(["core", "all"]), default="all", show_default=True)
@click.option("--profile", type=click.Choice(list(PROFILES)), default="standard", show_default=True)
@click.option("--device", type=DEVICE, default="cpu", show_default=True, help="cpu or cuda")
@click.option("--dtype", "dtypes", multiple=True, type=click.Choice(DTYPES), help="judge in these dtypes alone")
@click.option("-n", "workers", type=PROCESSES, default=None, help="processes; default: cores, at most 4")
@cluster_option
@click.option("--seed", type=SEED, default=0, show_default=True)
@deviation_options
@click.option("--out", type=FOLDER, help="folder for report.json, .html, .md, junit.xml and badge.svg")
@click.option("--format", "form", type=click.Choice(["text", *FORMATS]), default="text", show_default=True)
@click.option("--stable", is_flag=True, help="leave out what changes from run to run: times, the machine")
@click.option("--max-memory", type=GIBIBYTES, default=8.0, show_default=True, metavar="GIB",
              help="for each process on the CPU; 0 for no limit")  # fmt: skip
@click.option("--call-seconds", type=SECONDS, default=30.0, show_default=True, help="limit for one call of the subject")
@click.option("--allow-open", is_flag=True, help="open questions leave the exit status at 0")
@click.option("-v", "--verbose", is_flag=True, help="show every property, also those that do not apply")
def check(
    targets: tuple[str, ...],
    only: tuple[str, ...],
    exclude: tuple[str, ...],
    level: str,
    profile: str,
    device: str,
    dtypes: tuple[str, ...],
    workers: int | None,
    cluster: str | None,
    seed: int,
    deviations_file: Path | None,
    update_deviations: bool,
    reason: str | None,
    prune: bool,
    out: Path | None,
    form: str,
    stable: bool,
    max_memory: float,
    call_seconds: float,
    allow_open: bool,
    verbose: bool,
) -> int:
    """Judge TARGETs: package.module:attribute, path/file.py:attribute, or `reference`, `torch` and their parts."""
    if cluster is None:
        warm_up()
    settings = {
        "profile": profile, "seed": seed, "device": device, "dtypes": dtypes, "call_seconds": call_seconds,
        "named": only,
    }  # fmt: skip
    err = screen(aside=True)
    run = _Run(profile, seed, device)
    run.report.allow_open = allow_open
    size = workers or min(os.cpu_count() or 1, 4)
    whole = not only and not exclude  # of a part of the catalogue it says nothing that paths were not walked
    deviations = DeviationsFile(
        deviations_file, update=update_deviations, prune=prune, reason=reason, is_whole=whole and level == "all"
    )
    try:
        judges: Judges = Pool(size, settings, max_memory)
        if cluster is not None:
            folder, seconds = (out or Path()) / CASES, limit_of(most_seconds(profile))
            there = workers_of(cluster, workers, seconds=seconds, max_memory=max_memory, folder=folder)
            judges = PoolElsewhere(there, settings, max_memory)
        with judges as pool:
            chosen = pool.ask("select", only=only, exclude=exclude, level=level)
            loaded, versions = load_all(pool, targets, [p["id"] for p in chosen["properties"]])
            deviations.insist(chosen["catalogue"], [*_named(loaded)])
            run.report.versions |= versions
            run.judge(pool, chosen, loaded, err)
    except DeviationsError as problem:
        raise click.UsageError(str(problem)) from None
    except RefusedError as problem:
        if problem.is_usage:
            raise click.UsageError(str(problem)) from None
        say(f"Error: {problem}", aside=True)
        return NOTHING_JUDGED
    except KeyboardInterrupt:
        err.print("interrupted: what follows is what was known by then")
        run.interrupted = True
    except ClusterError as problem:
        if not run.report.subjects:
            raise
        say(f"Error: {problem}; what follows is what was known by then", aside=True)
        run.interrupted = True
    report = run.report
    unwritten = Unwritten()
    if not run.interrupted:
        with unwritten.attempt("the deviations file", DeviationsError):
            deviations.settle(report, err)
    folder = (out or Path()) / CASES
    with unwritten.attempt("the recorded cases", asked=False):
        write_cases(report, folder, settings)
    record = cleaned(without_changing(report.to_json()) if stable else report.to_json())
    if out is not None:
        with unwritten.attempt("the report"):
            write_all(record, out)
    if form != "text":
        say(FORMATS[form][1](record), end="")
    else:
        console = screen()
        judged = print_unjudged(console, record, verbose=verbose)
        print_report(console, judged, run.statements, run.catalogue_size, verbose=verbose, with_paths=whole,
                     planned=len(run.statements))  # fmt: skip
        for subject in record["subjects"]:
            others = told_by(subject)
            for result in shown_in_full(subject):
                repeated = how_to_repeat(folder / f"{result['counterexample']['id']}.json", subject["target"])
                statement, also = run.statements.get(result["id"], ""), others.get(result["id"], ())
                print_failure(console, result, statement, subject["name"], also=also, **repeated)
    return 130 if run.interrupted else unwritten.status(report.exit_status)


def limit_of(property_seconds: float) -> float:
    """Return the limit for one property: a search may shrink for as long as it looked, then call once more."""
    return 2 * property_seconds + 60


class _Run:
    """A report in the making."""

    def __init__(self, profile: str, seed: int, device: str) -> None:
        self.report = Report([], seed, profile, device)
        self.statements: dict[str, str] = {}
        self.catalogue_size = 0
        self.interrupted = False
        self.printed: dict[str, Printed] = {}

    def judge(self, pool: Judges, chosen: dict[str, Any], loaded: list[Loaded], err: Console) -> None:
        """Judge every subject that was loaded by every chosen property, and put faults into each."""
        started = time.perf_counter()
        properties = chosen["properties"]
        self.catalogue_size = len(chosen["catalogue"])
        subjects = [described for one in loaded for described in one.subjects]
        self.statements = {p["id"]: p["statement"] for p in properties}
        order = [p["id"] for p in properties]
        try:
            with Progress(
                TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
                console=err, transient=True, disable=not err.is_terminal,
            ) as progress:  # fmt: skip
                bar = progress.add_task("judging", total=len(subjects) * (len(properties) + 1))
                tasks: list[Task] = [self._canaries([d["kind"] for d in subjects], order)]
                for one in loaded:
                    if one.why is not None:
                        self.report.subjects.append(_unloaded(one, one.why))
                    for described in one.subjects:
                        name, target = cleaned(described["name"]), described["target"]
                        part = SubjectReport(name, described["kind"], target, cleaned(described["facts"]))
                        part.believed, part.claims = list(part.facts), cleaned(described["claims"])
                        if planned := cleaned(described["plan"]):
                            part.plan = planned["told"]
                            err.print(planned["sentence"], style="dim", markup=False, highlight=False, soft_wrap=True)
                        self.report.subjects.append(part)
                        self.printed[target] = printed = Printed()
                        printed += one.printed
                        usual = PROFILES[self.report.profile].property_seconds
                        seconds = (planned or {}).get("property_seconds", usual)
                        tasks += self._tasks(
                            part,
                            properties,
                            lambda p=part: progress.update(bar, advance=1, description=p.name),
                            seconds,
                        )
                pool.run(tasks)
        finally:
            for part in self.report.subjects:
                part.results.sort(key=lambda r: order.index(r.id) if r.id in order else -1)
                part.printed = _shown(self.printed.get(part.target)) or part.printed
                part.reach, part.unreached = reach_of(part.results), unreached_of(part.results)
            self.report.seconds = time.perf_counter() - started

    def _canaries(self, kinds: list[str], order: list[str]) -> Task:
        """Return the task that comes first: known-broken models, which this run must notice."""

        def sent(answer: dict[str, Any]) -> None:
            self.report.canaries = answer

        def lost(why: Lost) -> None:
            missed = [f"the canaries were not judged: {cleaned(why.why)}"]
            self.report.canaries = {"sent": 1, "caught": 0, "missed": missed, "lost": True}

        seconds = 60.0 + 10 * len(set(kinds))
        return Task("canaries", lambda: {"kinds": sorted(set(kinds)), "props": order}, sent, lost, [], seconds)

    def _tasks(
        self, part: SubjectReport, properties: list[dict[str, Any]], advance: Any, property_seconds: float
    ) -> list[Task]:
        found: dict[str, Task] = {}
        printed, seconds = self.printed[part.target], limit_of(property_seconds)

        def judged(answer: dict[str, Any]) -> None:
            part.results.append(result_of(cleaned(answer["result"])))
            part.seconds += part.results[-1].seconds
            part.probed = answer["probed"] or part.probed
            part.believed = [name for name in part.believed if name not in answer["verified"]]
            advance()

        for prop in properties:

            def lost(why: Lost, prop: dict[str, Any] = prop) -> None:
                part.results.append(Result(prop["id"], prop["level"], why.outcome, cleaned(why.why)))
                advance()

            def arguments(prop: dict[str, Any] = prop) -> dict[str, Any]:
                known = {r.id: r.outcome for r in part.results if r.id in prop["requires"]}
                return {"target": part.target, "prop": prop["id"], "known": known}

            needs = [found[i] for i in prop["requires"] if i in found]
            found[prop["id"]] = Task("judge", arguments, judged, lost, needs, seconds, part.target, printed)

        def proven(answer: dict[str, Any]) -> None:
            changed = {record["id"]: result_of(record) for record in cleaned(answer["reconsidered"])}
            part.results[:] = [changed.get(r.id, r) for r in part.results]
            part.power, part.never_walked = answer["power"], answer["never_walked"]
            advance()

        def power_of() -> dict[str, Any] | None:
            if not any(r.outcome in ("PASS", "FAIL", "OPEN") for r in part.results):
                return None
            passed = [r.id for r in part.results if r.outcome == "PASS"]
            walked = sorted({path for r in part.results for path in r.paths})
            troubled = [plain(r) for r in part.results if r.outcome in ("FAIL", "OPEN")]
            return {"target": part.target, "props": passed, "walked": walked, "troubled": troubled}

        def unproven(why: Lost) -> None:
            if why.outcome != "BLOCKED":
                part.power = {"noticed": 0, "tried": 0, "missed": [], "faults": [], "why": cleaned(why.why)}
            advance()

        every = list(found.values())
        return [*every, Task("power", power_of, proven, unproven, every, seconds, part.target, printed)]


def _named(loaded: list[Loaded]) -> Iterator[tuple[str, str]]:
    """Yield the name and the target of every subject, also of those that were not loaded."""
    for one in loaded:
        yield from ((cleaned(s["name"]), s["target"]) for s in one.subjects)
        if one.why is not None:
            yield _attribute(one.target), one.target


def _unloaded(one: Loaded, why: Lost) -> SubjectReport:
    """Return the report of a target that could not be loaded: one row."""
    part = SubjectReport(_attribute(one.target), "unknown", one.target, printed=_shown(one.printed))
    part.results.append(Result(LOADS, "core", why.outcome, cleaned(why.why)))
    return part


def _attribute(target: str) -> str:
    return target.rpartition(":")[2] or target


def _shown(printed: Printed | None) -> dict[str, Any] | None:
    """Return what was printed as a report has it: words in lines, nothing that a terminal would obey."""
    return {"size": printed.size, "text": readable(printed.text)} if printed is not None and printed.size else None

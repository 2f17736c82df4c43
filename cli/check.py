"""`veriformer check`: judge implementations."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from veriformer.cli.cluster import cluster_option, workers_of
from veriformer.cli.deviating import DeviationsFile, deviation_options
from veriformer.cli.options import DEVICE, FOLDER, GIBIBYTES, PROCESSES, SECONDS, SEED, OfAProject, told_of_project
from veriformer.cli.plugged import told_of_plugins, with_plugins
from veriformer.cli.processes.asking import Judges, Pool, RefusedError, warm_up
from veriformer.cli.processes.elsewhere import PoolElsewhere
from veriformer.cli.processes.loading import load_all
from veriformer.cli.recorded import repeated_from, write_cases
from veriformer.cli.running import Run, limit_of, named
from veriformer.cli.saying import said, saying_options
from veriformer.cli.speaking import Unwritten, say, screen
from veriformer.cli.unjudged import print_unjudged
from veriformer.clusters.opening import ClusterError
from veriformer.properties.bench.profiles import PROFILES, most_seconds
from veriformer.properties.known.deviations import DeviationsError
from veriformer.reports.failure import print_failure
from veriformer.reports.formats import FORMATS, write_all
from veriformer.reports.formats import stable as without_changing
from veriformer.reports.readable import cleaned
from veriformer.reports.records import CASES
from veriformer.reports.terminal import print_report
from veriformer.reports.verdicts import shown_in_full, told_by

NOTHING_JUDGED = 2
DTYPES = ("float64", "float32", "bfloat16", "float16")


@click.command(cls=OfAProject)
@click.argument("targets", nargs=-1, required=True, metavar="TARGET...")
@saying_options
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
    kind: str | None,
    declares: dict[str, Any],
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
    """Judge TARGETs: package.module:attribute, path/file.py:attribute, path/file.py, or `reference`, `torch`, ...

    What [tool.veriformer] of the pyproject.toml of this folder, or the next one above, says under the name of an option
    holds where the option is not given; `subjects` there are the TARGETs where none is given.
    """
    if cluster is None:
        warm_up(targets)
    settings = {
        "profile": profile, "seed": seed, "device": device, "dtypes": dtypes, "call_seconds": call_seconds,
        "named": only, **said(kind, declares),
    }  # fmt: skip
    err = screen(aside=True)
    for told in filter(None, (told_of_project(), told_of_plugins())):
        err.print(told, style="dim")
    run = Run(profile, seed, device)
    run.report.allow_open = allow_open
    size = workers or min(os.cpu_count() or 1, 4)
    whole = not only and not exclude  # of a part of the catalogue it says nothing that paths were not walked
    deviations = DeviationsFile(deviations_file, update=update_deviations, prune=prune, reason=reason)
    try:
        judging = with_plugins(settings)
        judges: Judges = Pool(size, judging, max_memory)
        if cluster is not None:
            folder, seconds = (out or Path()) / CASES, limit_of(most_seconds(profile))
            there = workers_of(cluster, workers, seconds=seconds, max_memory=max_memory, folder=folder)
            judges = PoolElsewhere(there, judging, max_memory)
        with judges as pool:
            chosen = pool.ask("select", only=only, exclude=exclude, level=level)
            loaded, versions = load_all(pool, targets, [p["id"] for p in chosen["properties"]])
            for one in loaded:
                if one.chosen:
                    err.print(cleaned(one.chosen), style="dim", markup=False, highlight=False, soft_wrap=True)
            deviations.insist(chosen["catalogue"], [*named(loaded)])
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
    repeat = repeated_from(folder)
    record = cleaned(without_changing(report.to_json()) if stable else report.to_json())
    if out is not None:
        with unwritten.attempt("the report"):
            write_all(record, out, repeat)
    if form != "text":
        say(FORMATS[form][1](record, repeat), end="")
    else:
        console = screen()
        judged = print_unjudged(console, record, verbose=verbose)
        print_report(console, judged, run.statements, run.catalogue_size, verbose=verbose, with_paths=whole,
                     planned=len(run.statements))  # fmt: skip
        for subject in record["subjects"]:
            others = told_by(subject)
            for result in shown_in_full(subject):
                statement, also = run.statements.get(result["id"], ""), others.get(result["id"], ())
                print_failure(console, result, statement, subject["name"], also=also,
                              **repeat(subject, result["counterexample"]))  # fmt: skip
    return 130 if run.interrupted else unwritten.status(report.exit_status)

"""`veriformer mutants`: the kill matrix, every broken model judged by every property."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from veriformer.cli.cluster import cluster_option, workers_of
from veriformer.cli.options import FOLDER, PROCESSES, SECONDS, SEED
from veriformer.cli.plugged import plugged, with_plugins
from veriformer.cli.processes.apart import Apart, Call
from veriformer.cli.processes.asking import NO_ANSWER, Judges, Pool
from veriformer.cli.processes.elsewhere import PoolElsewhere
from veriformer.cli.processes.judged_store import JudgedStore, fingerprint
from veriformer.cli.speaking import Unwritten, say, screen
from veriformer.properties.bench.profiles import PROFILES
from veriformer.properties.results.records import TIMEOUT
from veriformer.reports.formats import stable as without_changing
from veriformer.reports.kill_matrix import kill_matrix, markdown, print_matrix
from veriformer.reports.readable import cleaned

_JUDGING = "veriformer.tests.mutants.judging"
_GIB = 8.0  # for each process; a mutant takes a tenth of it


@click.command()
@click.option("--only", multiple=True, metavar="ID", help="judge these mutants alone; `SC*` for all whose id starts so")
@click.option("--source", is_flag=True, help="also mutants made from the reference's source, one change each")
@click.option("--profile", type=click.Choice(list(PROFILES)), default="quick", show_default=True)
@click.option("--seed", type=SEED, default=0, show_default=True)
@click.option("-n", "workers", type=PROCESSES, default=None, help="processes; default: cores, at most 4")
@cluster_option
@click.option("--format", "form", type=click.Choice(["text", "json", "markdown"]), default="text", show_default=True)
@click.option("--out", type=FOLDER, default=Path(".veriformer/mutants"),
              show_default=True, help="folder for what was judged; a second run goes on from there")  # fmt: skip
@click.option("--stable", is_flag=True, help="leave out of the JSON what changes from run to run: times")
@click.option("--fresh", is_flag=True, help="judge again what an earlier run has judged")
@click.option("--mutant-seconds", type=SECONDS, default=300.0, show_default=True, help="limit for one mutant")
def mutants(
    only: tuple[str, ...],
    source: bool,
    profile: str,
    seed: int,
    workers: int | None,
    cluster: str | None,
    form: str,
    out: Path,
    stable: bool,
    fresh: bool,
    mutant_seconds: float,
) -> int:
    """Judge every broken model of the fault zoo by every property, and table who notices what.

    Exit status: 0 every mutant is killed, 1 one survives that is not known to be equivalent, 2 one took longer than
    --mutant-seconds and is not judged, 3 usage.
    """
    from veriformer import properties, reference
    from veriformer.tests import mutants as zoo
    from veriformer.tests.mutants import all_faults
    from veriformer.tests.mutants.source import all_source_mutants

    added = plugged()
    wanted = dict.fromkeys([*all_faults(), *added.faults], False) | dict.fromkeys(all_source_mutants(), True)
    if only:
        chosen = {i: made for word in only for i, made in _matching(word, wanted).items()}
    else:
        chosen = {i: made for i, made in wanted.items() if source or not made}
    err = screen(aside=True)
    code = f"{fingerprint((properties, reference, zoo))}{added.code}"
    store = JudgedStore(out / "judged.jsonl", f"{profile} {seed} {code}")
    rows = {} if fresh else {i: row for i, row in store.read().items() if i in chosen and _is_whole(row)}
    if rows:
        err.print(f"{len(rows)} of {len(chosen)} mutants were judged before ({store.path}); --fresh judges them again")
    calls = {
        i: Call(f"{_JUDGING}:{'judge_source' if made else 'judge_fault'}", (i, profile, seed), (_JUDGING,))
        for i, made in chosen.items() if i not in rows
    }  # fmt: skip
    settings = {"profile": profile, "seed": seed, "device": "cpu", "dtypes": (), "call_seconds": 30.0, "named": ()}
    settings = with_plugins(settings)
    judges: Judges = Pool(workers or min(os.cpu_count() or 1, 4), settings, _GIB)
    if cluster is not None:
        there = workers_of(cluster, workers, seconds=mutant_seconds, max_memory=_GIB, folder=out)
        judges = PoolElsewhere(there, settings, _GIB)
    interrupted, unwritten = False, Unwritten()
    try:
        with judges:
            for ended in Apart(judges, "mutants", mutant_seconds).run(calls, err):
                name = ended.name
                why = ended.why or f"{NO_ANSWER} while it was judged"
                is_row = ended.row is not None and _is_whole(ended.row)
                rows[name] = cleaned(ended.row if is_row else _row(name, chosen[name], mutant_seconds, why))
                if ended.lost is not None and ended.lost.outcome == TIMEOUT:
                    rows[name]["timed_out"] = True  # it is judged anew by the next run, which may give it longer
                    continue
                with unwritten.attempt(f"the row of {name}", asked=False):
                    store.append(name, rows[name])
    except KeyboardInterrupt:
        err.print("interrupted: what follows is what was known by then; the same command goes on from there")
        interrupted = True
    judged = [rows[i] for i in chosen if i in rows]
    matrix = kill_matrix(judged, [*_properties(), *added.levels], whole=not only, profile=profile, seed=seed)
    if form == "json":
        say(json.dumps(without_changing(matrix) if stable else matrix, indent=1))
    elif form == "markdown":
        say(markdown(matrix))
    else:
        print_matrix(screen(), matrix)
    return 130 if interrupted else status_of(matrix)


def status_of(matrix: Mapping[str, Any]) -> int:
    """Return 1 when a mutant survives, 2 when none does but one was not judged to its end, else 0."""
    return 1 if matrix["survivors"] else 2 if matrix["timed_out"] else 0


def _is_whole(row: object) -> bool:
    """Whether a stored row is one that judging a mutant gives; any other counts as not judged."""
    if not isinstance(row, dict) or not {*_row("", False, 0.0, "")} <= {*row}:
        return False
    first, words = row["first_kill"], [row["id"], row["origin"], row["title"]]
    words += [row.get(name) or "" for name in ("bug", "citation", "located", "equivalent")]
    for name in ("killed_by", "expected", "blocked"):
        if not isinstance(several := row.get(name, []), list):
            return False
        words += several
    if not isinstance(row["errors"], dict) or not isinstance(row["examples"], dict):
        return False
    kill = first if isinstance(first, dict) else {"seconds": 0, "examples": 1}
    numbers = [row["seconds"], *row["examples"].values(), kill.get("seconds"), kill.get("examples")]
    return (
        all(isinstance(word, str) for word in [*words, *row["errors"].values()])
        and all(type(number) in (int, float) and 0 <= number < 1e300 for number in numbers)
        and (first is None or isinstance(first, dict))
        and isinstance(row.get("timed_out", False), bool)
    )


def _matching(word: str, wanted: Mapping[str, bool]) -> dict[str, bool]:
    if word.endswith("*"):
        found = {i: made for i, made in wanted.items() if i.startswith(word[:-1])}
    else:
        found = {word: wanted[word]} if word in wanted else {}
    if not found:
        import difflib

        close = difflib.get_close_matches(word, wanted, n=1, cutoff=0.3)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise click.UsageError(f"there is no mutant {word!r}{hint}")
    return found


def _properties() -> list[dict[str, Any]]:
    from veriformer.properties.judging.catalogue import catalogue

    return [{"id": p.id, "level": p.level} for p in catalogue().values()]


def _row(mutant: str, made: bool, seconds: float, told: str) -> dict[str, Any]:
    """Return the row of a mutant whose process gave no answer."""
    return {
        "id": mutant, "origin": "source" if made else "zoo", "bug": None, "title": mutant, "killed_by": [],
        "errors": {"process": told}, "examples": {}, "seconds": seconds, "first_kill": None,
    }  # fmt: skip

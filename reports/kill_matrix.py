"""The kill matrix: which property notices which broken model, as a record, a terminal table and Markdown."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text
from tabulate import tabulate

from veriformer.reports.readable import in_markdown

SCHEMA = "veriformer-mutants/1"


def kill_matrix(
    rows: Sequence[Mapping[str, Any]],
    properties: Sequence[Mapping[str, Any]],
    *,
    whole: bool,
    profile: str,
    seed: int,
) -> dict[str, Any]:
    """Return the record of a run.

    Args:
        rows: one a mutant.
        properties: the catalogue.
        whole: whether the whole zoo was judged, so that a property without a kill is one that nothing shows failing.
        profile: of the run.
        seed: of the run.

    Returns:
        `mutants` (the rows), `survivors`, `timed_out`, `equivalent`, `idle` (properties that kill nothing), and counts.
    """
    kills = Counter(i for row in rows for i in row["killed_by"])
    survivors = [row["id"] for row in rows if not is_noticed(row) and not is_timed_out(row)]
    proofs = {row["id"]: row["equivalent"] for row in rows if row.get("equivalent")}
    zoo = [row for row in rows if row["origin"] != "source"]
    first = [row["first_kill"]["seconds"] for row in rows if row["first_kill"]]
    located = Counter(row["located"] for row in zoo if row.get("located"))
    return {
        "schema": SCHEMA,
        "profile": profile,
        "seed": seed,
        "mutants": list(rows),
        "survivors": [i for i in survivors if i not in proofs],
        "timed_out": [row["id"] for row in rows if is_timed_out(row)],
        "equivalent": {i: proof for i, proof in proofs.items() if i in survivors},
        "unexpected": {
            row["id"]: missing
            for row in zoo
            if (missing := sorted({*row.get("expected", ())} - {*row["killed_by"], *row.get("blocked", ())}))
        },
        "kills": {p["id"]: kills[p["id"]] for p in properties},
        "idle": [p["id"] for p in properties if not kills[p["id"]]] if whole else [],
        "located": {word: located[word] for word in ("right", "silent", "wrong")},
        "seconds": {
            "median_to_first_kill": round(statistics.median(first), 3) if first else None,
            "worst_to_first_kill": max(first) if first else None,
            "total": round(sum(row["seconds"] for row in rows), 1),
        },
    }


def is_noticed(row: Mapping[str, Any]) -> bool:
    """Whether a mutant was killed by a property, or broke down (raised, hung) where a right model works."""
    return bool(row["killed_by"] or row["errors"]) and not is_timed_out(row)


def is_timed_out(row: Mapping[str, Any]) -> bool:
    """Whether the judgement of a mutant was stopped at its limit of time: nothing is known of it."""
    return bool(row.get("timed_out"))


def summary(matrix: Mapping[str, Any]) -> list[str]:
    """Return what the matrix shows, in a few sentences."""
    rows = matrix["mutants"]
    groups = Counter(row["origin"] for row in rows)
    dead = Counter(row["origin"] for row in rows if is_noticed(row))
    told = [f"{dead[origin]} of {groups[origin]} {_ORIGINS.get(origin, origin)} are noticed" for origin in groups]
    broken = sum(not row["killed_by"] and is_noticed(row) for row in rows)
    lines = ["; ".join(told) + (f" ({broken} of them by raising or hanging alone)" if broken else "") + "."]
    if matrix["timed_out"]:
        lines.append(f"Timed out, not judged: {', '.join(matrix['timed_out'])}; --mutant-seconds gives them longer.")
    located = matrix["located"]
    total = sum(located.values())
    if total:
        lines.append(
            f"Likely cause named in the first failure that names one: right {located['right']} "
            f"({located['right'] / total:.0%}), silent {located['silent']}, wrong {located['wrong']}."
        )
    seconds = matrix["seconds"]
    if seconds["median_to_first_kill"] is not None:
        lines.append(
            f"Seconds from the first call to the first kill: median {seconds['median_to_first_kill']:g}, "
            f"worst {seconds['worst_to_first_kill']:g}."
        )
    if matrix["idle"]:
        lines.append(f"Properties that kill nothing: {', '.join(matrix['idle'])}.")
    if matrix["equivalent"]:
        lines.append(f"{len(matrix['equivalent'])} survivors are equivalent, each with a proof.")
    return lines


_ORIGINS = {
    "documented": "forms of documented defects",
    "systematic": "other faults written by hand",
    "source": "changes to the reference's source",
    "zoo": "others, whose process gave no answer,",
}


def print_matrix(console: Console, matrix: Mapping[str, Any], most: int = 6) -> None:
    """Print a line a mutant and what follows from them."""
    for row in matrix["mutants"]:
        mark, style = _mark(row)
        line = Text(f"{mark} ", style=style)
        line.append(row["id"], style="bold").append(f"  {row['title']}\n", style="default")
        line.append(f"    {_told(row, most)}", style="dim")
        console.print(line)
    for mutant, proof in matrix["equivalent"].items():
        console.print(Text(f"equivalent: {mutant}: {proof}", style="dim"))
    for mutant in matrix["survivors"]:
        console.print(Text(f"SURVIVES: {mutant}", style="bold red"))
    for mutant, missing in matrix["unexpected"].items():
        console.print(Text(f"not noticed by all that promise to: {mutant}: {', '.join(missing)}", style="yellow"))
    for line_of in summary(matrix):
        console.print(line_of)


def _mark(row: Mapping[str, Any]) -> tuple[str, str]:
    """Return the sign of a row and its style."""
    if is_noticed(row):
        return "✓", "green"
    if is_timed_out(row):
        return "-", "bold yellow"
    return ("=", "dim") if row.get("equivalent") else ("✗", "bold red")


def _told(row: Mapping[str, Any], most: int) -> str:
    killers = row["killed_by"]
    if is_timed_out(row):
        return f"timed out, not judged: {'; '.join(row['errors'].values())}"
    if killers:
        more = f" and {len(killers) - most} more" if len(killers) > most else ""
        told = f"killed by {', '.join(killers[:most])}{more}"
    elif row["errors"]:
        told = "breaks down: " + "; ".join(f"{i}: {why}" for i, why in list(row["errors"].items())[:2])
    else:
        told = "survives"
    first = row["first_kill"]
    if first:
        told += f"; first after {first['seconds']:.2g} s, {first['examples']} examples"
    return told + (f"; cause {row['located']}" if row.get("located") else "")


def markdown(matrix: Mapping[str, Any]) -> str:
    """Return the matrix as Markdown: what it shows, mutants by killers, properties by kills."""
    lines = ["# Kill matrix", "", *summary(matrix), ""]
    if matrix["survivors"]:
        lines += ["**Survivors:** " + ", ".join(matrix["survivors"]), ""]
    if matrix["timed_out"]:
        lines += ["**Timed out, not judged:** " + ", ".join(matrix["timed_out"]), ""]
    zoo = [row for row in matrix["mutants"] if row["origin"] != "source"]
    if zoo:
        lines += ["## The zoo", "", _zoo_table(zoo), ""]
    made = [row for row in matrix["mutants"] if row["origin"] == "source"]
    if made:
        lines += ["## Changes to the reference's source", "", _source_table(made), ""]
        lines += ["### Equivalent", "", *(f"- `{i}`: {proof}" for i, proof in matrix["equivalent"].items()), ""]
    kills = sorted(matrix["kills"].items(), key=lambda pair: -pair[1])
    lines += ["## Kills by property", "", tabulate(kills, headers=["property", "mutants killed"], tablefmt="github")]
    return "\n".join(lines)


def _zoo_table(rows: Sequence[Mapping[str, Any]]) -> str:
    table = [
        {
            "mutant": row["id"],
            "what is broken": row["title"] + (f" ({row['citation']})" if row.get("citation") else ""),
            "killed by": _fate(row),
            "examples": row["first_kill"]["examples"] if row["first_kill"] else "",
            "s to first": f"{row['first_kill']['seconds']:.2f}" if row["first_kill"] else "",
            "cause": row.get("located", ""),
        }
        for row in rows
    ]
    return tabulate(table, headers="keys", tablefmt="github", disable_numparse=True)


def _fate(row: Mapping[str, Any]) -> str:
    """Return who noticed a mutant, or what became of it, as Markdown."""
    if is_timed_out(row):
        return "timed out, not judged"
    return ", ".join(row["killed_by"]) or "; ".join(map(in_markdown, row["errors"].values())) or "**survives**"


def _source_table(rows: Sequence[Mapping[str, Any]]) -> str:
    modules = sorted({row["id"].partition(".")[0] for row in rows})
    table = []
    for module in modules:
        own = [row for row in rows if row["id"].startswith(f"{module}.")]
        marks = [_mark(row)[0] for row in own]
        table.append(
            {
                "module": module,
                "changes": len(own),
                "killed by a property": sum(bool(row["killed_by"]) for row in own),
                "raise or hang": sum(not row["killed_by"] and is_noticed(row) for row in own),
                "equivalent": sum(mark == "=" for mark in marks),
                "survive": sum(mark == "✗" for mark in marks),
                **({"timed out": late} if (late := sum(mark == "-" for mark in marks)) else {}),
            }
        )
    return tabulate(table, headers="keys", tablefmt="github")

"""Tables of an ablation record: terminal, Markdown, LaTeX, CSV."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd
from tabulate import tabulate

from veriformer.reports.readable import in_a_sheet, in_markdown

Study = Mapping[str, Any]
Row = Mapping[str, Any]

DASH = "–"


def interval(values: Sequence[float | None] | None, digits: int = 3, signed: bool = False) -> str:
    """Return `value [low, high]`; an end that is not finite is shown as such.

    >>> interval([0.5, 0.25, None], 2)
    '0.50 [0.25, ∞]'
    """
    if values is None or values[0] is None:
        return DASH
    sign = "+" if signed else ""
    value, low, high = values
    told = [f"{value:{sign}.{digits}f}"]
    told += ["-∞" if low is None else f"{low:{sign}.{digits}f}", "∞" if high is None else f"{high:{sign}.{digits}f}"]
    return f"{told[0]} [{told[1]}, {told[2]}]"


def p_value(p: float | None) -> str:
    """Return a p-value with two digits, `<0.001` below; a dash where nothing was tested."""
    return DASH if p is None else "<0.001" if p < 0.001 else f"{p:.2g}"


def of(count: Mapping[str, Any]) -> str:
    """Return `k/n`, or a dash for none."""
    return f"{count['count']}/{count['of']}" if count["count"] else DASH


def number(value: float | None, digits: int = 3) -> str:
    """Return a number with some significant digits, large ones with a prefix.

    >>> number(26_100_000.0), number(0.25), number(None)
    ('26.1M', '0.25', '–')
    """
    if value is None:
        return DASH
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):.{digits}g}{letter}"
    return f"{value:.{digits}g}"


def speech(row: Row) -> str:
    """Return the verdict with what belongs to it: the pace, and what the seeds could not have seen."""
    told = str(row["verdict"])
    if told == "no evidence":
        told += _unseen(row)
    if told == "alike if alive":
        told += f" (dead seeds up to {row['dead']['not_excluded']:.0%} not excluded)"
    if row["pace"]:
        told += f", {row['pace']}"
    return told + unstable(row.get("repeats"))


REPEATS = 0.95
"""Share of redrawn runs with the same verdict, below which it is called unstable."""


def unstable(repeats: float | None) -> str:
    """Return what is said of a verdict that does not hold when the seeds are drawn again; nothing where it does.

    >>> unstable(0.71), unstable(0.99), unstable(None)
    (', unstable (71 % repeat)', '', '')
    """
    return f", unstable ({100 * repeats:.0f} % repeat)" if repeats is not None and repeats < REPEATS else ""


def _unseen(row: Row) -> str:
    least, seen = row.get("smallest_detectable"), row.get("detectable")
    if seen is None:  # a record of before deaths were simulated
        return "" if least is None else f" (could see {least:.2g})" if least < 1 else " (could see nothing)"
    told = [] if least is None else [f"{least:.2f} by {seen['dead_share']:.0%} dead"]
    told += [] if seen["shift"] is None else [f"{max(seen['shift'], 0.001):.3f} of all"]
    return f" (could see {' or '.join(told) or 'nothing'})"


def prediction(row: Row) -> str:
    """Return what was predicted and what became of it."""
    return "; ".join(f"{p['expects']}: {p['outcome']}" for p in row["predictions"]) or DASH


def outcomes_of(record: Mapping[str, Any]) -> list[str]:
    """Return what became of every prediction of a record: of its rows, and of what is made of the rows of a study.

    >>> fit = {"expectations": [{"outcome": "contradicted"}]}
    >>> outcomes_of({"studies": [{"rows": [{"predictions": [{"outcome": "confirmed"}]}], "fit": fit}]})
    ['confirmed', 'contradicted']
    """
    told = [p["outcome"] for study in record["studies"] for row in study["rows"] for p in row["predictions"]]
    return told + [
        e["outcome"] for study in record["studies"] for e in (study.get("fit") or {}).get("expectations", ())
    ]


def counts_of(outcomes: Sequence[str]) -> str:
    """Return how many predictions came true; theorems, and equality where both solve the task, are no predictions.

    >>> counts_of(["confirmed", "theorem", "ceiling", "ceiling"])
    '1 confirmed, 0 contradicted, 0 undecided; not counted: 1 theorem, 2 at the ceiling'
    """
    told = ", ".join(f"{outcomes.count(o)} {o}" for o in ("confirmed", "contradicted", "undecided"))
    theorems, ceiling = outcomes.count("theorem"), outcomes.count("ceiling")
    beside = [f"{theorems} theorem{'s' if theorems > 1 else ''}"] if theorems else []
    beside += [f"{ceiling} at the ceiling"] if ceiling else []
    return told + (f"; not counted: {', '.join(beside)}" if beside else "")


_SHORT: Mapping[str, Callable[[Row], str]] = {
    "task": lambda r: r["task"],
    "setting": lambda r: r["setting"],
    "variant": lambda r: r["variant"],
    "accuracy [95 %]": lambda r: interval(r["accuracy"]),
    "difference [95 %]": lambda r: interval(r.get("difference"), signed=True),
    "p Holm": lambda r: p_value(r.get("p_holm")),
    "dead": lambda r: of(r["dead"]),
    "diverged": lambda r: of(r["diverged"]),
    "verdict": speech,
    "prediction": prediction,
}
_MORE: Mapping[str, Callable[[Row], str]] = {
    "parameters": lambda r: number(r["parameters"]),
    "FLOPs/step": lambda r: number(r["flops"]),
    "s/trial": lambda r: number(r["seconds"], 2),
    "IQM": lambda r: f"{r['interquartile_mean']:.3f}",
    "P(base > variant)": lambda r: number(r.get("probability_of_improvement")),
    "p exact": lambda r: p_value(r.get("p")),
    "difference of the living [95 %]": lambda r: interval((r.get("alive") or {}).get("difference"), signed=True),
    "p Holm, area": lambda r: p_value(r.get("area_p_holm")),
    "p Holm, dead": lambda r: p_value(r.get("dead_p_holm")),
    "dead [95 %]": lambda r: interval(r["dead"]["share"], 2),
    "loss area": lambda r: number(r["loss_area"]),
    "max loss": lambda r: number(r["max_loss"]),
    "spikes": lambda r: f"{r['spikes']['seeds']}/{r['seeds']}" if r["spikes"]["steps"] else DASH,
    "steps to 95 %": lambda r: reached(r["steps_to_95"]),
}


def reached(steps: Mapping[str, Any]) -> str:
    """Return the mean of steps to 95 % over the seeds that got there, and how many did where not all."""
    if not steps["reached"]:
        return DASH
    return f"{steps['mean']:.0f}" + ("" if steps["reached"] == steps["of"] else f" ({steps['reached']}/{steps['of']})")


def metric_of(study: Study) -> str:
    """Return what the study measures: accuracy, or what the tasks of one's own call their metric."""
    names = {task.get("metric", "accuracy") for task in study.get("tasks", ())}
    return names.pop() if len(names) == 1 else "metric" if names else "accuracy"


def _columns(study: Study, whole: bool) -> dict[str, Callable[[Row], str]]:
    metric = metric_of(study)
    columns = {name.replace("accuracy", metric): make for name, make in _SHORT.items()} | dict(_beside(study))
    if not any(r["setting"] for r in study["rows"]):
        del columns["setting"]
    if not any(r["predictions"] for r in study["rows"]):
        del columns["prediction"]
    if not whole:
        for name in ("diverged", "dead"):
            if not any(r[name]["count"] for r in study["rows"]):
                del columns[name]
        return columns
    return {**columns, **_MORE}


def _beside(study: Study) -> dict[str, Callable[[Row], str]]:
    """Return the columns of what is asked beside accuracy: at other lengths, and of the confidence."""
    tried = dict.fromkeys(length for r in study["rows"] for length in r.get("lengths", ()))
    columns: dict[str, Callable[[Row], str]] = {f"at T={length}": _at_length(length) for length in tried}
    if (study.get("fit") or {}).get("kind") == "calibration":
        columns["ECE"] = lambda r: _decimal(r["calibration_error"])
    return columns


def _at_length(length: str) -> Callable[[Row], str]:
    return lambda row: _decimal(row["lengths"].get(length))


def _decimal(value: float | None) -> str:
    return DASH if value is None else f"{value:.3f}"


def cells(study: Study, *, whole: bool = True) -> tuple[list[str], list[list[str]]]:
    """Return the headings and the lines of a study's table; see `table`."""
    columns = _columns(study, whole)
    return list(columns), [[make(row) for make in columns.values()] for row in study["rows"]]


def table(study: Study, form: str, *, whole: bool = True) -> str:
    """Return a study's rows as a table.

    Args:
        study: of the record.
        form: a format of `tabulate`: "simple", "pipe", "latex_booktabs", ...
        whole: every column, or those that fit on a screen.
    """
    columns, lines = cells(study, whole=whole)
    if not whole:
        _blank_repeats(lines, [name for name in columns if name in ("task", "setting")])
    if form == "pipe":
        lines = [[in_markdown(cell) for cell in line] for line in lines]
    return tabulate(lines, headers=columns, tablefmt=form, disable_numparse=True)


def _blank_repeats(lines: list[list[str]], leading: Sequence[str]) -> None:
    """Leave out what the line above says already."""
    above: list[str] = []
    for line in lines:
        now = line[: len(leading)]
        for index in range(len(leading)):
            if above[: index + 1] == now[: index + 1]:
                line[index] = ""
        above = now


def noise_line(study: Study) -> str:
    """Return the noise floor: the spread of the base over seeds, which a single run cannot see through."""
    known = [n["standard_deviation"] for n in study["noise"] if n["standard_deviation"] is not None]
    if not known:
        return "noise floor: one seed tells nothing of it"
    least, most = min(known), max(known)
    span = f"{most:.4f}" if least == most else f"{least:.4f} to {most:.4f}"
    return f"noise floor: the base's {metric_of(study)} has a standard deviation of {span} over seeds"


def family_line(study: Study) -> str:
    """Return how many tests the study's p are corrected for."""
    left = study.get("untested", 0)
    return f"{study['tests']} tests in the family" + (f", {left} of them not made here" if left else "")


def theorems(study: Study) -> list[str]:
    """Return one line for every theorem that was checked on trained models."""
    told = []
    for row in study["rows"]:
        for name, check in row["checks"].items():
            mark = "✓" if check["holds"] else "✗"
            told.append(
                f"{mark} {row['task']}, {row['variant']}: {name} changes no logit of {check['models']} trained models "
                f"on {check['inputs']:,} inputs (largest relative difference {check['difference']:.1e}, float64)"
            )
    return told


def flat(record: Mapping[str, Any]) -> pd.DataFrame:
    """Return every row of every study with raw numbers, for CSV."""
    lines = []
    for study in record["studies"]:
        for row in study["rows"]:
            line: dict[str, Any] = {"study": study["name"]}
            for name, value in row.items():
                if name in ("curves", "attention", "by_seed", "predictions", "checks", "stack", "alive"):
                    continue
                if name in ("accuracy", "difference", "area_difference"):
                    line |= {name: value[0], f"{name}_low": value[1], f"{name}_high": value[2]}
                elif isinstance(value, Mapping):
                    line |= {f"{name}_{k}": v for k, v in value.items() if not isinstance(v, list)}
                else:
                    line[name] = in_a_sheet(value) if isinstance(value, str) else value
            line["predicted"] = prediction(row)
            lines.append(line)
    return pd.DataFrame(lines)

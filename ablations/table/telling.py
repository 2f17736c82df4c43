"""From the finished trials of the table to its part of the record: every number, and every trial that it comes from."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from veriformer.ablations.statistics.intervals import binomial_interval, mean_interval, share_not_excluded
from veriformer.ablations.statistics.paired import ALPHA, smallest_p
from veriformer.ablations.table.conclusions import conclusions
from veriformer.ablations.table.design import PARTS, Cell, Design
from veriformer.ablations.table.stages import LEARNED, Found, Stages, point_of
from veriformer.ablations.tasks import TASKS
from veriformer.ablations.trials.trial import Trial
from veriformer.ablations.verdicts.costs import cost_of
from veriformer.ablations.verdicts.rows import Records, Row, compare, verdict
from veriformer.ablations.verdicts.stability import repeats, shows_nothing

DEVICES = ("cpu", "cuda")
Get = Callable[[Iterable[str]], Found]


def tell(stages: Stages, get: Get) -> dict[str, Any]:
    """Return the table of every device that has one, with the trials behind it.

    Args:
        stages: of this run.
        get: finds records by their keys.
    """
    design, points = stages.design, stages.design.points()
    by_device: dict[str, list[dict[str, Any]]] = {}
    trials: list[dict[str, Any]] = []
    for device in DEVICES:
        own = replace(stages, grouping=replace(stages.grouping, device=device))
        found = own.find(get)
        if found or device == stages.grouping.device:
            lines, behind = _of_device(own, found)
            by_device[device] = lines
            trials += behind
    rows = []
    for index, cell in enumerate(design.cells()):
        told = {device: lines[index] for device, lines in by_device.items()}
        trial = design.trial(cell, points[0], 0, "cpu")
        rows.append(
            {
                "task": cell.task, "num_layers": cell.num_layers, "removed": list(cell.removed),
                "forced": cell.is_forced, **cost_of(trial), "devices": told,
                "agreement": _agreement([told.get(d) for d in DEVICES]),
            }
        )  # fmt: skip
    main = by_device[stages.grouping.device]
    return {
        "device": stages.grouping.device,
        "devices": list(by_device),
        "config": dict(design.config),
        "recipe": asdict(design.recipe),
        "parts": list(PARTS),
        "tasks": [_about(name, design) for name in design.tasks],
        "depths": list(design.depths),
        "points": [{"name": point.name, **asdict(point)} for point in points],
        "tuning_seeds": list(design.tuning_seeds()),
        "warnings": warnings_before(design),
        "first_seed": design.first_seed,
        "learned": LEARNED,
        "rows": rows,
        "conclusions": conclusions(design, main),
        "trials": _columns(trials),
    }


def number_of_tests(design: Design) -> int:
    """Return the tests of the whole table, also where it was cut: accuracy, loss area and dead seeds of a row each."""
    cells = (design.whole or design).cells()
    return 3 * sum(bool(cell.removed) and not cell.is_forced for cell in cells)


def warnings_before(design: Design) -> list[str]:
    """Return what must be said before a table is made: too few seeds for any verdict."""
    compared = [cell for cell in design.cells() if cell.removed and not cell.is_forced]
    tests = number_of_tests(design)
    seeds = min((len(design.reporting_seeds(cell)) for cell in compared), default=0)
    if not compared or tests * smallest_p(seeds) <= ALPHA:
        return []
    return [
        f"table: {seeds} seeds cannot reach a verdict; the smallest p is {smallest_p(seeds):.2g} and there are "
        f"{tests} tests (Holm), so nothing but theorems will be decided"
    ]


def _about(name: str, design: Design) -> dict[str, Any]:
    task = TASKS[name]
    return {
        "name": name, "statement": task.statement, "chance": task.chance, "best": task.best, "length": task.length,
        "vocab_size": task.vocab_size, "needs": list(task.needs),
        "seeds": len(design.reporting_seeds(Cell(name, design.depths[0], ()))), "steps": design.recipe_of(name).steps,
    }  # fmt: skip


def _of_device(stages: Stages, found: Found) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return a line a cell, and a line a trial."""
    design = stages.design
    lines: list[dict[str, Any]] = []
    trials: list[dict[str, Any]] = []
    compared: list[tuple[Cell, dict[str, Any], Row]] = []
    base: Records | None = None
    for cell in design.cells():
        at_best, line = _line(stages, cell, found, trials)
        if not cell.removed:
            base = at_best
        lines.append(line)
        if at_best and base and len(base) >= len(at_best):  # seeds of a theorem's row are the first of the others'
            paired = base[: len(at_best)] if cell.removed else None
            row = Row(TASKS[cell.task], "", "", at_best, paired, cell.is_forced)
            compared.append((cell, line, row))
    compare([row for *_, row in compared], {"": number_of_tests(design)})
    for _, line, row in compared:
        line["verdict"] = verdict(row)
    for cell, line, row in compared:
        if row.base is None or row.accuracy is None:
            continue
        line["difference"] = _interval(row.accuracy.difference)
        line["span"] = row.span
        line["p"], line["p_holm"] = row.accuracy.p, None if row.is_forced else row.accuracy_holm
        if not row.is_forced and row.is_decidable:
            share = row.accuracy.p / row.accuracy_holm if row.accuracy_holm > 0 else 1.0
            beside = [(t, r) for c, t, r in compared if c is not cell and c.removed and _is_beside(c, cell)]
            others = [_differences(r) for t, r in beside if shows_nothing(t["verdict"])] * shows_nothing(
                line["verdict"]
            )
            line["repeats"] = repeats([r["accuracy"] for r in row.base], row.values("accuracy"), share, others)
    return lines, trials


def _is_beside(cell: Cell, other: Cell) -> bool:
    """Whether two cells are of one task and depth, and no theorem settles them."""
    return (cell.task, cell.num_layers, cell.is_forced, other.is_forced) == (other.task, other.num_layers, False, False)


def _differences(row: Row) -> list[float]:
    return [v["accuracy"] - b["accuracy"] for b, v in zip(row.base or (), row.records, strict=False)]


def _line(
    stages: Stages, cell: Cell, found: Found, trials: list[dict[str, Any]]
) -> tuple[Records | None, dict[str, Any]]:
    """Return the records at a row's best, and the line; what is behind it is added to `trials`."""
    line: dict[str, Any] = {
        "best": None, "worst": None, "trains": None, "verdict": None, "difference": None, "p": None, "p_holm": None,
        "repeats": None, "checks": {},
    }  # fmt: skip
    tuned = stages.tuned(cell, found)
    _note(trials, "tuning", cell, stages, list(stages.records(stages.tuning(cell), found)))
    if tuned:
        line["trains"] = {"count": sum(tuned.trains), "of": len(tuned.trains), "by_point": list(tuned.trains)}
        wanted = {"best": stages.reporting(cell, tuned.best), "worst": stages.reporting(cell, tuned.worst)}
    elif cell.is_forced:
        wanted = dict.fromkeys(("best", "worst"), stages.everywhere(cell))
    else:
        return None, line
    at_best: Records | None = None
    for stage, jobs in wanted.items():
        finished = list(stages.records(jobs, found))
        _note(trials, stage, cell, stages, finished)
        if len(finished) == len(stages.design.reporting_seeds(cell)):
            point = None if cell.is_forced else point_of(finished[0][0]).name
            line[stage] = {"point": point, **_numbers(cell, [record for _, record in finished])}
            if stage == "best":
                at_best = [record for _, record in finished]
    if cell.is_forced and at_best:
        line["checks"] = {
            name: {
                "models": len(at_best),
                "difference": max(r["checks"][name]["difference"] for r in at_best),
                "holds": all(r["checks"][name]["holds"] for r in at_best),
            }
            for name in at_best[0]["checks"]
        }
    return at_best, line


def _numbers(cell: Cell, records: Records) -> dict[str, Any]:
    row = Row(TASKS[cell.task], "", "", records, None, cell.is_forced)
    accuracy, dead = row.values("accuracy"), row.dead()
    mean = sum(accuracy) / len(accuracy)
    reached = [r["steps_to_95"] for r in records if r["steps_to_95"] is not None]
    largest = [r["max_loss"] for r in records if r["max_loss"] is not None]
    return {
        "seeds": len(records),
        # what a theorem settles scatters over no seeds
        "accuracy": [mean, mean, mean] if cell.is_forced else _interval(mean_interval(accuracy, row.bounds)),
        "bounds": list(row.bounds or ()),
        "by_seed": accuracy,
        "dead": {
            "count": dead, "of": len(records), "share": _interval(binomial_interval(dead, len(records))),
            "not_excluded": share_not_excluded(dead, len(records)),
        },
        "diverged": {"count": sum(r["diverged"] is not None for r in records), "of": len(records)},
        "steps_to_95": {
            "mean": sum(reached) / len(reached) if reached else None, "reached": len(reached), "of": len(records),
        },
        "max_loss": max(largest, default=None),
        "seconds": sum(r["seconds"] for r in records) / len(records),
    }  # fmt: skip


def _interval(interval: Any) -> list[float | None]:
    return [v if math.isfinite(v) else None for v in (interval.value, interval.low, interval.high)]


def _note(
    trials: list[dict[str, Any]], stage: str, cell: Cell, stages: Stages,
    finished: Sequence[tuple[Trial, Mapping[str, Any]]],
) -> None:  # fmt: skip
    names = [point.name for point in stages.design.points()]
    for trial, record in finished:
        trials.append(
            {
                "device": stages.grouping.device, "task": cell.task, "num_layers": cell.num_layers,
                "removed": "+".join(cell.removed), "stage": stage, "point": names.index(point_of(trial).name),
                "seed": trial.seed, "accuracy": record["accuracy"],
                "dead": bool(Row(TASKS[cell.task], "", "", [record], None, False).dead()),
                "steps_to_95": record["steps_to_95"], "loss_area": record["loss_area"], "max_loss": record["max_loss"],
                "diverged": record["diverged"] is not None, "seconds": record["seconds"],
            }
        )  # fmt: skip


def _columns(trials: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the trials by column, which is how a table library reads them, and a tenth of the size."""
    return {name: [trial[name] for trial in trials] for name in (trials[0] if trials else ())}


def _agreement(told: Sequence[Mapping[str, Any] | None]) -> dict[str, Any] | None:
    """Return whether two devices tell the same of a row: intervals of best and worst that meet, the same verdict."""
    if any(line is None or not line["best"] or not line["worst"] for line in told):
        return None
    first, second = (line for line in told if line is not None)
    meets = {}
    for stage in ("best", "worst"):
        (_, low, high), (_, other_low, other_high) = first[stage]["accuracy"], second[stage]["accuracy"]
        ends = (low, high, other_low, other_high)
        meets[stage] = None in ends or (low <= other_high and other_low <= high)
    return {**meets, "verdict": first["verdict"] == second["verdict"]}

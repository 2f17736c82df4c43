"""From a finished study to its rows: numbers, a verdict each, and what became of the predictions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from veriformer.ablations.statistics.paired import (
    ALPHA,
    Comparison,
    Interval,
    fisher_p,
    holm,
    interquartile_mean,
    mean_interval,
    probability_of_improvement,
    smallest_detectable,
    smallest_p,
    wilson,
)
from veriformer.ablations.studies.study import Prediction, Study
from veriformer.ablations.tasks import Task
from veriformer.ablations.training.samples import HELD_OUT

EQUIVALENT = 0.01
"""Difference of accuracy, one point, inside which two variants count as equivalent."""

CEILING = 0.005
"""Distance from the best possible at which accuracy has nothing left to tell."""

DEAD_ERRORS = 3.0
"""A seed is dead when its accuracy is within three standard errors of chance: a live one at chance is 1 in 740."""

Records = Sequence[Mapping[str, Any]]


@dataclass
class Row:
    """One (task, setting, variant): its records by seed, and the comparison with its base."""

    task: Task
    setting: str
    variant: str
    records: Records
    base: Records | None
    is_forced: bool
    is_decidable: bool = True
    accuracy: Comparison | None = None
    area: Comparison | None = None
    accuracy_holm: float = math.nan
    area_holm: float = math.nan

    def values(self, name: str) -> list[float]:
        """Return a number of every seed."""
        return [float(r[name]) for r in self.records]

    def dead(self, records: Records | None = None) -> int:
        """Return how many seeds are at chance."""
        chance = self.task.chance
        band = DEAD_ERRORS * math.sqrt(chance * (1 - chance) / HELD_OUT)
        return sum(r["accuracy"] <= chance + band for r in (self.records if records is None else records))

    @property
    def at_ceiling(self) -> bool:
        """Whether base and variant both are as good as can be, so that accuracy cannot tell them apart."""
        both = [*self.records, *(self.base or ())]
        return all(r["accuracy"] >= self.task.best - CEILING for r in both)


def loss_areas(records: Records, task: Task) -> list[float]:
    """Return the area under the loss of each seed, nats; one that was not finite counts as ten times guessing."""
    worst = 10 * math.log(1 / task.chance)
    return [min(r["loss_area"], worst) if r["loss_area"] is not None else worst for r in records]


def compare(rows: Sequence[Row]) -> int:
    """Fill in the comparisons of rows that have a base; return the number of tests in the family.

    A theorem is not tested but checked, so it takes no share of the level.
    """
    tested = [row for row in rows if row.base is not None and not row.is_forced]
    for row in rows:
        if row.base is not None:
            row.accuracy = Comparison.of([r["accuracy"] for r in row.base], row.values("accuracy"))
            row.area = Comparison.of(loss_areas(row.base, row.task), loss_areas(row.records, row.task))
    found = [c.p for row in tested for c in (row.accuracy, row.area) if c is not None]
    adjusted = iter(holm(found))
    decidable = bool(found) and len(found) * smallest_p(len(tested[0].records)) <= ALPHA
    for row in tested:
        row.accuracy_holm, row.area_holm, row.is_decidable = next(adjusted), next(adjusted), decidable
    return len(found)


def verdict(row: Row) -> str:
    """Return hurts, helps, equivalent, no evidence; or forced, where a theorem says so and the check agrees.

    With so few seeds that nothing could become significant, nothing is called equivalent either: too few seeds.
    """
    if row.base is None or row.accuracy is None:
        return "base"
    if row.is_forced:
        checks = [check for record in row.records for check in record["checks"].values()]
        return "forced" if checks and all(c["holds"] for c in checks) else "theorem violated"
    if not row.is_decidable:
        return "too few seeds"
    low, high = row.accuracy.difference.low, row.accuracy.difference.high
    if low >= -EQUIVALENT and high <= EQUIVALENT:
        return "equivalent"  # a difference that is certain and below one point is told by its interval
    if row.accuracy_holm < ALPHA and not low <= 0 <= high:
        return "hurts" if row.accuracy.difference.value < 0 else "helps"
    return "no evidence"


def pace(row: Row) -> str:
    """Return slower or faster when the area under the loss says so; it speaks where accuracy is at its ceiling."""
    if row.area is None or row.is_forced or not row.is_decidable or not row.area_holm < ALPHA:
        return ""
    return "slower" if row.area.difference.value > 0 else "faster"


def outcome(prediction: Prediction, row: Row) -> str:
    """Return what became of a prediction: confirmed, contradicted or undecided."""
    found, expected = verdict(row), prediction.expects
    if expected == "depends":
        return "undecided"
    if expected == "chance":
        alive = len(row.records) - row.dead()
        interval = mean_interval(row.values("accuracy"))
        if alive == 0 and (prediction.theorem == "" or found == "forced"):
            return "confirmed"
        return "contradicted" if interval.low > row.task.chance + EQUIVALENT else "undecided"
    if expected in ("slower", "faster"):
        seen = pace(row)
        return "undecided" if not seen else "confirmed" if seen == expected else "contradicted"
    if found == expected or (expected == "equivalent" and found == "forced"):
        return "confirmed"
    return "undecided" if found in ("no evidence", "too few seeds") else "contradicted"


def describe(row: Row, tests: int, study: Study) -> dict[str, Any]:
    """Return a row as plain data."""
    accuracy = row.values("accuracy")
    seeds = len(accuracy)
    dead = row.dead()
    reached = [r["steps_to_95"] for r in row.records if r["steps_to_95"] is not None]
    told = [p for p in study.predictions if p.speaks_of(row.task.name, row.setting, row.variant)]
    largest = [r["max_loss"] for r in row.records if r["max_loss"] is not None]
    result: dict[str, Any] = {
        "task": row.task.name,
        "setting": row.setting,
        "variant": row.variant,
        "seeds": seeds,
        "accuracy": _interval(mean_interval(accuracy)),
        "interquartile_mean": interquartile_mean(accuracy),
        "by_seed": accuracy,
        "dead": {"count": dead, "of": seeds, "share": _interval(wilson(dead, seeds))},
        "diverged": {"count": sum(r["diverged"] is not None for r in row.records), "of": seeds},
        "spikes": {
            "steps": sum(r["spikes"] for r in row.records),
            "seeds": sum(r["spikes"] > 0 for r in row.records),
        },
        "max_loss": max(largest, default=None),
        "loss_area": sum(loss_areas(row.records, row.task)) / seeds,
        "steps_to_95": {"mean": sum(reached) / len(reached) if reached else None, "reached": len(reached), "of": seeds},
        "loss": _mean([r["loss"] for r in row.records]),
        "reducible_loss": _reducible(row),
        "calibration_error": _mean([r["calibration_error"] for r in row.records]),
        "seconds": sum(r["seconds"] for r in row.records) / seeds,
        "stack": sorted({r["stack"] for r in row.records}),
        "lengths": {length: _mean([r["lengths"][length] for r in row.records]) for length in row.records[0]["lengths"]},
        "checks": _checks(row.records),
        "verdict": verdict(row),
        "pace": pace(row),
        "predictions": [
            {"expects": p.expects, "source": p.source, "theorem": p.theorem, "outcome": outcome(p, row)} for p in told
        ],
    }
    if row.base is not None and row.accuracy is not None and row.area is not None:
        base = [float(r["accuracy"]) for r in row.base]
        differences = [v - b for v, b in zip(accuracy, base, strict=True)]
        result |= {
            "difference": _interval(row.accuracy.difference),
            "p": row.accuracy.p,
            "p_holm": None if row.is_forced else row.accuracy_holm,
            "area_difference": _interval(row.area.difference),
            "area_p_holm": None if row.is_forced else row.area_holm,
            "probability_of_improvement": probability_of_improvement(base, accuracy),
            "smallest_detectable": _number(smallest_detectable(differences, max(1, tests), 1 / HELD_OUT)),
            "dead_p": fisher_p((row.dead(row.base), len(base)), (dead, seeds)),
            "at_ceiling": row.at_ceiling,
        }
    return result


def _reducible(row: Row) -> float | None:
    """Return the mean held-out loss above the lowest possible, nats."""
    loss = _mean([r["loss"] for r in row.records])
    return None if loss is None else loss - row.task.loss_floor


def _checks(records: Records) -> dict[str, Any]:
    names = records[0]["checks"]
    return {
        name: {
            "models": len(records),
            "inputs": sum(r["checks"][name]["inputs"] for r in records),
            "difference": max(r["checks"][name]["difference"] for r in records),
            "holds": all(r["checks"][name]["holds"] for r in records),
        }
        for name in names
    }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _interval(interval: Interval) -> list[float | None]:
    return [_number(interval.value), _number(interval.low), _number(interval.high)]

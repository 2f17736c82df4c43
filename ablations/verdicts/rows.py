"""From a finished study to its rows: numbers, and a verdict each."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from veriformer.ablations.statistics.intervals import Interval, binomial_interval, mean_interval, share_not_excluded
from veriformer.ablations.statistics.paired import (
    ALPHA,
    Comparison,
    holm,
    interquartile_mean,
    probability_of_improvement,
    sign_flip_p,
    smallest_p,
)
from veriformer.ablations.statistics.power import Detectable, smallest_detectable
from veriformer.ablations.tasks import Task
from veriformer.ablations.training.samples import HELD_OUT
from veriformer.ablations.verdicts.stability import repeats

CEILING = 0.005
"""Distance from the best possible at which accuracy has nothing left to tell."""

DEAD_ERRORS = 3.0
"""A seed is dead when its accuracy is within three standard errors of chance: a live one at chance is 1 in 740."""

Record = Mapping[str, Any]
Records = Sequence[Record]


@dataclass
class Row:
    """One (task, setting, variant): its records by seed, and the comparison with its base.

    Attributes:
        task: that was learned.
        setting: under which.
        variant: its name.
        records: by seed.
        base: records of the base, by the same seeds; None: this is the base.
        is_forced: whether a theorem settles it.
        claim: what identifies the comparison; rows of one claim are one test.
        family: study whose tests it is corrected with.
        tests: in the family.
    """

    task: Task
    setting: str
    variant: str
    records: Records
    base: Records | None
    is_forced: bool
    claim: str = ""
    family: str = ""
    tests: int = 0
    is_decidable: bool = True
    accuracy: Comparison | None = None
    area: Comparison | None = None
    dead_p: float = math.nan
    accuracy_holm: float = math.nan
    area_holm: float = math.nan
    dead_holm: float = math.nan

    def values(self, name: str) -> list[float]:
        """Return a number of every seed."""
        return [float(r[name]) for r in self.records]

    @property
    def dead_line(self) -> float:
        """Metric at which, or on the worse side of which, a seed is dead; nan where chance is not known."""
        chance = self.task.chance
        if not self.task.is_accuracy:
            return chance
        return chance + DEAD_ERRORS * math.sqrt(chance * (1 - chance) / HELD_OUT)

    def is_dead(self, record: Record) -> bool:
        """Return whether a seed is at chance."""
        if self.task.lower_is_better:
            return bool(record["accuracy"] >= self.dead_line)
        return bool(record["accuracy"] <= self.dead_line)

    def dead(self, records: Records | None = None) -> int:
        """Return how many seeds are at chance; none where chance is not known."""
        return sum(map(self.is_dead, self.records if records is None else records))

    @functools.cached_property
    def bounds(self) -> tuple[float, float] | None:
        """Accuracies that no seed passes: a dead one guesses, a living one is at best as good as can be.

        One that was seen to be worse than guessing, or by luck of the held-out samples above the best, moves them.
        Where chance is not known an accuracy is not below 0; another metric has no bounds that anybody knows.
        """
        if not self.task.is_accuracy:
            return None
        seen = [float(r["accuracy"]) for r in (*self.records, *(self.base or ()))]
        worst = 2 * self.task.chance - self.dead_line if math.isfinite(self.task.chance) else 0.0
        return min(worst, *seen), max(self.task.best, *seen)

    @property
    def span(self) -> float | None:
        """The largest difference of accuracy that is possible; None where nobody knows."""
        return None if self.bounds is None else self.bounds[1] - self.bounds[0]

    @functools.cached_property
    def alive(self) -> list[float]:
        """Differences of accuracy of the seeds that live in base and variant."""
        pairs = zip(self.base or (), self.records, strict=False)
        return [v["accuracy"] - b["accuracy"] for b, v in pairs if not (self.is_dead(b) or self.is_dead(v))]

    @property
    def at_ceiling(self) -> bool:
        """Whether base and variant both are as good as can be, so that accuracy cannot tell them apart."""
        both = [*self.records, *(self.base or ())]
        if self.task.lower_is_better:
            return all(r["accuracy"] <= self.task.best + CEILING for r in both)
        return all(r["accuracy"] >= self.task.best - CEILING for r in both)


def loss_areas(records: Records, task: Task) -> list[float]:
    """Return the area under the loss of each seed, nats; one that was not finite counts as ten times guessing.

    Where nobody knows what guessing costs, it counts as ten times the largest loss that was finite.
    """
    worst = 10 * math.log(1 / task.chance) if task.loss is None else math.nan
    if math.isnan(worst):
        worst = 10 * max((abs(r["max_loss"]) for r in records if r["max_loss"] is not None), default=1.0)
    return [min(r["loss_area"], worst) if r["loss_area"] is not None else worst for r in records]


def compare(rows: Sequence[Row], sizes: Mapping[str, int] | None = None) -> None:
    """Fill in the comparisons of rows that have a base, corrected within their families.

    A theorem is not tested but checked, so it takes no share of the level.

    Args:
        rows: of one run, of all of its studies.
        sizes: tests in each family, also those that this run did not make.
    """
    families: dict[str, dict[str, list[Row]]] = {}
    for index, row in enumerate(rows):
        if row.base is None:
            continue
        accuracies = [float(r["accuracy"]) for r in row.base]
        row.accuracy = Comparison.of(accuracies, row.values("accuracy"), row.span)
        row.area = Comparison.of(loss_areas(row.base, row.task), loss_areas(row.records, row.task))
        row.dead_p = sign_flip_p(
            [float(row.is_dead(v)) - row.is_dead(b) for b, v in zip(row.base, row.records, strict=True)]
        )
        if not row.is_forced:
            families.setdefault(row.family, {}).setdefault(row.claim or str(index), []).append(row)
    for name, claims in families.items():
        firsts = [same[0] for same in claims.values()]
        found = [p for row in firsts for p in raw(row)]
        size = max(len(found), (sizes or {}).get(name, 0))
        adjusted = holm(found, size)
        for place, same in enumerate(claims.values()):
            for row in same:
                row.accuracy_holm, row.area_holm, row.dead_holm = adjusted[3 * place : 3 * place + 3]
                row.tests, row.is_decidable = size, size * smallest_p(len(row.records)) <= ALPHA


def raw(row: Row) -> tuple[float, float, float]:
    """Return the p of accuracy, loss area and dead seeds before any correction."""
    if row.accuracy is None or row.area is None:
        raise ValueError(f"the row of {row.variant} is not compared yet; call compare on it")
    return row.accuracy.p, row.area.p, row.dead_p


def verdict(row: Row) -> str:
    """Return hurts, helps, equivalent, alike if alive, no evidence; or forced, where a theorem says so and holds.

    *equivalent*: the interval of the mean, with the seeds that may die though none did, is within one point; that takes
    some hundred seeds. *alike if alive*: no seed died, the interval of the living is within one point, and what
    share of seeds may die all the same is told beside it. With so few seeds that nothing could become significant,
    nothing is called equivalent either: too few seeds.
    """
    if row.base is None or row.accuracy is None:
        return "base"
    if row.is_forced:
        checks = [check for record in row.records for check in record["checks"].values()]
        return "forced" if checks and all(c["holds"] for c in checks) else "theorem violated"
    if not row.is_decidable:
        return "too few seeds"
    if row.accuracy.difference.within(row.task.margin):
        return "equivalent"  # a difference that is certain and below one point is told by its interval
    if len(row.alive) == len(row.records) and mean_interval(row.alive).within(row.task.margin):
        return "alike if alive"
    if row.accuracy_holm < ALPHA:
        return "helps" if (row.accuracy.difference.value > 0) != row.task.lower_is_better else "hurts"
    if row.dead_holm < ALPHA:
        return "hurts" if row.dead() > row.dead(row.base) else "helps"
    return "no evidence"


def pace(row: Row) -> str:
    """Return slower or faster when the area under the loss says so; it speaks where accuracy is at its ceiling."""
    if row.area is None or row.is_forced or not row.is_decidable or not row.area_holm < ALPHA:
        return ""
    return "slower" if row.area.difference.value > 0 else "faster"


def detectable(row: Row) -> Detectable:
    """Return what the tests could have seen of a row, at the level of the family's first step.

    The most that a living seed can lose is what it is better than chance; where chance is not known, all that it has.
    """
    base = row.base or ()
    living = [float(r["accuracy"]) for r in base if not row.is_dead(r)]
    mean = sum(living) / len(living) if living else 0.0
    fall = abs(mean - row.task.chance) if math.isfinite(row.task.chance) else abs(mean)
    return smallest_detectable(
        tuple(row.alive), 1 - len(living) / len(base), len(base), fall, ALPHA / max(row.tests, 1)
    )


def describe(row: Row) -> dict[str, Any]:
    """Return a row as plain data."""
    accuracy = row.values("accuracy")
    seeds = len(accuracy)
    dead = row.dead()
    reached = [r["steps_to_95"] for r in row.records if r["steps_to_95"] is not None]
    largest = [r["max_loss"] for r in row.records if r["max_loss"] is not None]
    found = verdict(row)
    result: dict[str, Any] = {
        "task": row.task.name,
        "setting": row.setting,
        "variant": row.variant,
        "seeds": seeds,
        "accuracy": _interval(mean_interval(accuracy, row.bounds)),
        "interquartile_mean": interquartile_mean(accuracy),
        "by_seed": accuracy,
        "dead": {
            "count": dead,
            "of": seeds,
            "share": _interval(binomial_interval(dead, seeds)),
            "not_excluded": share_not_excluded(dead, seeds),
        },
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
        "verdict": found,
        "pace": pace(row),
    }
    if row.base is not None and row.accuracy is not None and row.area is not None:
        base = [float(r["accuracy"]) for r in row.base]
        seen = detectable(row) if found == "no evidence" else Detectable(None, None, None)
        result |= {
            "difference": _interval(row.accuracy.difference),
            "alive": {
                "pairs": len(row.alive),
                "difference": _interval(mean_interval(row.alive)) if row.alive else None,
            },
            "p": row.accuracy.p,
            "p_holm": None if row.is_forced else row.accuracy_holm,
            "area_difference": _interval(row.area.difference),
            "area_p": row.area.p,
            "area_p_holm": None if row.is_forced else row.area_holm,
            "dead_p": row.dead_p,
            "dead_p_holm": None if row.is_forced else row.dead_holm,
            "family": {"name": row.family, "tests": row.tests},
            "probability_of_improvement": probability_of_improvement(base, accuracy),
            "smallest_detectable": seen.fall,
            "detectable": asdict(seen),
            "at_ceiling": row.at_ceiling,
            "repeats": None if row.is_forced or not row.is_decidable else repeats(base, accuracy, _share_of_level(row)),
        }
    return result


def _share_of_level(row: Row) -> float:
    """Return the part of the family's level that the test of a row's accuracy has, by Holm."""
    return row.accuracy.p / row.accuracy_holm if row.accuracy is not None and row.accuracy_holm > 0 else 1.0


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

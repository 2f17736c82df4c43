"""Derive the table of parts again from its single trials, with nothing of veriformer, and hold it against what is told.

    python benchmarks/rederive_table.py reports/gallery/table/ablation.json

Reads the JSON alone: settings of the sweep, what is known of the tasks, one line a trial. Derives which setting is a
row's best and worst, how many train, accuracy, dead seeds with their interval, divergence, steps to 95 %,
differences, exact agreement of theorems' rows with chance, and the tests of the ranges. Intervals of means and p-values
are random draws in both places: a bootstrap and sign flips of its own have to come near. Exit status 1 where anything
differs.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

HELD_OUT = 1024  # samples of the final test
KEYS = ["device", "task", "num_layers", "removed", "stage"]


class Comparing:
    """Counts what was compared, and notes what differs."""

    def __init__(self) -> None:
        self.count, self.different = 0, list[str]()

    def same(self, what: str, told: Any, derived: Any, tolerance: float = 1e-9) -> None:
        """Compare two values; numbers within a tolerance."""
        self.count += 1
        if isinstance(told, int | float) and isinstance(derived, int | float | np.number):
            agrees = math.isclose(float(told), float(derived), rel_tol=tolerance, abs_tol=tolerance)
        else:
            agrees = told == derived
        if not agrees:
            self.different.append(f"{what}: the table says {told}, its trials {derived}")


TIES = 4 / 1024
"""Accuracy that ties in float32 may move: the theorem itself is checked in float64."""


def bootstrap(values: np.ndarray) -> tuple[float, float]:
    """Return the 95 % percentile interval of a mean."""
    rng = np.random.default_rng(1)
    means = values[rng.integers(len(values), size=(20_000, len(values)))].mean(axis=1)
    return float(np.quantile(means, 0.025)), float(np.quantile(means, 0.975))


def weighted(values: np.ndarray, bounds: list[float]) -> tuple[float, float]:
    """Return the 95 % interval of a mean of values within bounds (Gaffke 2005)."""
    drawn = np.random.default_rng(3).exponential(size=(20_000, len(values) + 1))
    drawn /= drawn.sum(axis=1, keepdims=True)
    sums = drawn[:, :-1] @ values
    low, high = (sums + drawn[:, -1] * bound for bound in bounds)
    return float(np.quantile(low, 0.025)), float(np.quantile(high, 0.975))


def exact_share(successes: int, trials: int) -> tuple[float, float]:
    """Return the exact 95 % interval of a share (Clopper & Pearson 1934), by halving."""

    def tail(share: float, counts: range) -> float:
        return sum(math.comb(trials, k) * share**k * (1 - share) ** (trials - k) for k in counts)

    def where(counts: range, rises: bool) -> float:
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if (tail(middle, counts) < 0.025) == rises else (low, middle)
        return (low + high) / 2

    low = where(range(successes, trials + 1), True) if successes else 0.0
    return low, where(range(successes + 1), False) if successes < trials else 1.0


def sign_flip(differences: np.ndarray) -> float:
    """Return the two-sided p of paired differences under random flips of their signs."""
    rng = np.random.default_rng(2)
    flips = rng.choice((-1.0, 1.0), size=(200_000, len(differences)))
    return float(np.mean(np.abs(flips @ differences) >= abs(differences.sum()) - 1e-12))


def sign_test(lost: int, won: int) -> float:
    """Return the exact two-sided p of a sign test."""
    n, least = lost + won, min(lost, won)
    return min(1.0, 2 * sum(math.comb(n, k) for k in range(least + 1)) / 2**n) if n else 1.0


def holm(values: list[float]) -> list[float]:
    """Return p-values adjusted for their number."""
    order = np.argsort(values, kind="stable")
    adjusted = np.maximum.accumulate([min(1.0, (len(values) - i) * values[k]) for i, k in enumerate(order)])
    return [float(adjusted[list(order).index(i)]) for i in range(len(values))]


def at(frame: pd.DataFrame, row: dict[str, Any], device: str, stage: str) -> pd.DataFrame:
    """Return the trials of one row and stage, by seed."""
    wanted = [device, row["task"], row["num_layers"], "+".join(row["removed"]), stage]
    chosen = (frame[KEYS] == wanted).all(axis=1)
    return frame[chosen].sort_values("seed", kind="stable")


def near(
    comparing: Comparing, what: str, told: list[float | None], values: np.ndarray, bounds: list[float] | None = None
) -> None:
    """Hold an interval against draws of its own: each end within a third of its width, or half a point.

    With bounds the draws are flat Dirichlet weights of the values and of one more at the bound, and a tenth of the
    width is allowed; without them, those of a bootstrap.
    """
    comparing.same(f"{what} mean", told[0], values.mean())
    if told[1] is None or told[2] is None or (np.ptp(values) == 0 and bounds is None):
        return
    width = told[2] - told[1]
    slack = max(0.005, width / 3) if bounds is None else max(0.002, width / 10)
    own_ends = bootstrap(values) if bounds is None else weighted(values, bounds)
    for name, end, own in zip(("low", "high"), told[1:], own_ends, strict=True):
        comparing.same(f"{what} {name}", abs(end - own) <= slack, True)


def check_stage(comparing: Comparing, what: str, told: dict[str, Any], trials: pd.DataFrame, task: dict) -> None:
    """Hold what is told of a row's best or worst against its trials."""
    accuracy = trials["accuracy"].to_numpy(dtype=float)
    exactly = told["accuracy"][0] == told["accuracy"][1] == told["accuracy"][2]
    near(comparing, f"{what} accuracy", told["accuracy"], accuracy, None if exactly else told.get("bounds"))
    band = 3 * math.sqrt(task["chance"] * (1 - task["chance"]) / HELD_OUT)
    dead = int((accuracy <= task["chance"] + band).sum())
    comparing.same(f"{what} seeds", told["seeds"], len(trials))
    comparing.same(f"{what} seeds of the task", told["seeds"], task["seeds"])
    comparing.same(f"{what} dead", told["dead"]["count"], dead)
    comparing.same(f"{what} dead of single trials", dead, int(trials["dead"].sum()))
    for name, end, own in zip(("low", "high"), told["dead"]["share"][1:], exact_share(dead, len(trials)), strict=True):
        comparing.same(f"{what} dead {name}", end, own)
    comparing.same(f"{what} diverged", told["diverged"]["count"], int(trials["diverged"].sum()))
    steps = trials["steps_to_95"].dropna()
    comparing.same(f"{what} reached", told["steps_to_95"]["reached"], len(steps))
    comparing.same(f"{what} steps", told["steps_to_95"]["mean"], float(steps.mean()) if len(steps) else None)


def check_tuning(comparing: Comparing, what: str, line: dict, trials: pd.DataFrame, table: dict, task: dict) -> None:
    """Find the best and the worst setting again, and how many train."""
    worst_area = 10 * math.log(1 / task["chance"])
    area = trials["loss_area"].astype(float).fillna(worst_area).clip(upper=worst_area)
    by_point = trials.assign(area=area).groupby("point").agg({"accuracy": "mean", "area": "mean"}).sort_index()
    merit = [(a, -b) for a, b in zip(by_point["accuracy"], by_point["area"], strict=True)]
    names = [table["points"][i]["name"] for i in by_point.index]
    for stage, choice in (("best", max(merit)), ("worst", min(merit))):
        comparing.same(f"{what} {stage} setting", line[stage]["point"], names[merit.index(choice)])
    line_of_learning = task["chance"] + table["learned"] * (task["best"] - task["chance"])
    trains = trials.groupby("point")["accuracy"].min().sort_index() >= line_of_learning
    comparing.same(f"{what} settings that train", line["trains"]["by_point"], [bool(v) for v in trains])
    comparing.same(f"{what} number that train", line["trains"]["count"], int(trains.sum()))


def check(table: dict[str, Any]) -> Comparing:
    """Derive everything again."""
    comparing = Comparing()
    frame = pd.DataFrame(table["trials"])
    tasks = {task["name"]: task for task in table["tasks"]}
    tuning, reporting = (set(frame[(frame["stage"] == "tuning") == t]["seed"]) for t in (True, False))
    comparing.same("seeds that tune and report", sorted(tuning & reporting), [])
    for row in table["rows"]:
        task = tasks[row["task"]]
        for device, line in row["devices"].items():
            what = f"{device} {row['task']} N={row['num_layers']} without {'+'.join(row['removed']) or 'nothing'}"
            if not (line["best"] and line["worst"]):
                continue
            settings = len(table["points"]) if row["forced"] else math.inf  # a theorem's row: a seed a setting
            asked = {**task, "seeds": min(task["seeds"], settings)}
            for stage in ("best", "worst"):
                check_stage(comparing, f"{what} {stage}", line[stage], at(frame, row, device, stage), asked)
            if row["forced"]:
                exact = at(frame, row, device, "best")["accuracy"]
                # a sample and its swap have equal logits; rounding may break their ties
                comparing.same(f"{what} at chance", bool((abs(exact - task["chance"]) <= TIES).all()), True)
            else:
                check_tuning(comparing, what, line, at(frame, row, device, "tuning"), table, task)
            if row["removed"] and line["difference"] is not None:
                without = at(frame, row, device, "best")["accuracy"].to_numpy(dtype=float)
                whole = at(frame, {**row, "removed": []}, device, "best")["accuracy"].to_numpy(dtype=float)
                difference = without - whole[: len(without)]
                bounds = [-line["span"], line["span"]] if line.get("span") else None
                near(comparing, f"{what} difference", line["difference"], difference, bounds)
                p = sign_flip(difference)
                slack = 5 * math.sqrt(max(p, 1e-4) / 1e5)
                comparing.same(f"{what} p near {p:.2g}", abs(line["p"] - p) <= slack, True)
    told = [c for c in table["conclusions"]["comparisons"] if c["range_p"] is not None]
    lines = {(r["task"], r["num_layers"], *r["removed"]): r["devices"][table["device"]] for r in table["rows"]}
    found = []
    for entry in told:
        place = (entry["task"], entry["num_layers"])
        pairs = list(
            zip(lines[place]["trains"]["by_point"], lines[*place, entry["part"]]["trains"]["by_point"], strict=True)
        )
        found.append(sign_test(sum(a and not b for a, b in pairs), sum(b and not a for a, b in pairs)))
        comparing.same(f"{place} {entry['part']} range", entry["range_p"], found[-1])
    for entry, p in zip(told, holm(found), strict=True):
        comparing.same(f"{entry['task']} N={entry['num_layers']} {entry['part']} range, Holm", entry["range_p_holm"], p)
    return comparing


def main(arguments: list[str]) -> int:
    """Check one file; return the exit status."""
    path = Path(arguments[0] if arguments else "reports/gallery/table/ablation.json")
    table = json.loads(path.read_text(encoding="utf-8")).get("table")
    if not table:
        print(f"{path} holds no table of parts; make one with `veriformer ablate`")
        return 1
    comparing = check(table)
    for line in comparing.different:
        print(line)
    trials = len(table["trials"].get("seed", ()))
    print(f"{comparing.count} values derived again from {trials} trials, {len(comparing.different)} differ")
    return 1 if comparing.different or not comparing.count else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""From stored trials to the record that reports are made of: `veriformer-ablation/1`."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from veriformer.ablations.execution.plan import Grouping
from veriformer.ablations.statistics.fits import FITS
from veriformer.ablations.statistics.paired import ALPHA, smallest_p
from veriformer.ablations.studies.study import Setting, Study, Variant
from veriformer.ablations.tasks import TASKS
from veriformer.ablations.verdicts.costs import cost_of
from veriformer.ablations.verdicts.rows import Row, compare, describe

FORMAT = "veriformer-ablation/1"

Found = Mapping[str, Mapping[str, Any]]
"""Records of finished trials by key."""


def versions() -> dict[str, str]:
    """Return what the numbers depend on besides the code."""
    return {"torch": torch.__version__, "python": platform.python_version(), "machine": platform.machine()}


def warnings_before(study: Study, seeds: int) -> list[str]:
    """Return what must be said before a study runs: too few seeds for any verdict."""
    tests = 2 * sum(
        variant is not study.variants[0] and not study.is_forced(task, setting, variant)
        for task, setting, variant in study.rows()
    )
    if tests and tests * smallest_p(seeds) > ALPHA:
        enough = next((n for n in range(1, 64) if tests * smallest_p(n) <= ALPHA), None)
        advice = f"give --seeds {enough} or more" if enough else "name fewer tasks or variants"
        return [
            f"{study.name}: {seeds} seeds cannot reach a verdict; the smallest p is {smallest_p(seeds):.2g} and "
            f"there are up to {tests} tests (Holm), so nothing but theorems will be decided; {advice}"
        ]
    return []


def summarise(study: Study, seeds: int, grouping: Grouping, found: Found) -> dict[str, Any]:
    """Return a study's part of the record; rows with trials missing are left out and counted."""
    rows: list[Row] = []
    missing, places = 0, []
    for task, setting, variant in study.rows():
        records = _records(study, task, setting, variant, seeds, grouping, found)
        base = study.variants[0]
        against = None if variant is base else _records(study, task, setting, base, seeds, grouping, found)
        complete = len(records) == seeds and (against is None or len(against) == seeds)
        missing += seeds - len(records)
        if complete:
            forced = study.is_forced(task, setting, variant)
            rows.append(Row(TASKS[task], setting.name, variant.name, records, against, forced))
            places.append((task, setting, variant))
    tests = compare(rows)
    told = []
    for row, (task, setting, variant) in zip(rows, places, strict=True):
        trial = study.trial(task, setting, variant, 0, grouping.device)
        told.append({**describe(row, tests, study), **cost_of(trial), **_curves(row.records)})
    return {
        "name": study.name,
        "question": study.question,
        "source": study.source,
        "base": study.variants[0].name,
        "config": dict(study.config),
        "recipe": _plain(study),
        "variants": [{"name": v.name, "removes": v.removes} for v in study.variants],
        "tasks": [_about(name) for name in study.tasks],
        "tests": tests,
        "warnings": warnings_before(study, seeds),
        "missing": missing,
        "noise": _noise(rows),
        "rows": told,
        "fit": FITS[study.fit](told) if study.fit and told else None,
    }


def _records(
    study: Study, task: str, setting: Setting, variant: Variant, seeds: int, grouping: Grouping, found: Found
) -> list[Mapping[str, Any]]:
    keys = [key for job in grouping.jobs(study, task, setting, variant, seeds) for key in job.keys]
    return [found[key] for key in keys if key in found]


def _plain(study: Study) -> dict[str, Any]:
    return {name: getattr(study.recipe, name) for name in study.recipe.__dataclass_fields__}


def _about(name: str) -> dict[str, Any]:
    task = TASKS[name]
    return {
        "name": name, "statement": task.statement, "chance": task.chance, "best": task.best, "needs": list(task.needs),
        "length": task.length, "loss_floor": task.loss_floor,
    }  # fmt: skip


def _noise(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the spread of each base over its seeds: below it no single run can tell anything."""
    spread: Callable[[list[float]], float | None] = lambda v: float(np.std(v, ddof=1)) if len(v) > 1 else None  # noqa: E731
    return [
        {"task": r.task.name, "setting": r.setting, "standard_deviation": spread(r.values("accuracy"))}
        for r in rows
        if r.base is None
    ]


def _curves(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return curves over seeds: median and quartiles of the loss, means of what is watched by layer."""
    curves = [r["curves"] for r in records]
    loss = np.array([[np.nan if v is None else v for v in c["loss"]] for c in curves], dtype=float)
    held = np.array([[np.nan if v is None else v for v in c["held_out_accuracy"]] for c in curves], dtype=float)
    norms = {
        part: _rounded(
            _mean_over(np.array([[np.nan if v is None else v for v in c["gradient_norm"][part]] for c in curves]))
        )
        for part in curves[0]["gradient_norm"]
    }
    entropy = [c["entropy"] for c in curves if c["entropy"] and c["entropy"][0]]
    return {
        "curves": {
            "step": curves[0]["step"],
            "loss": {
                name: _rounded(_quantile(loss, q)) for name, q in (("low", 0.25), ("median", 0.5), ("high", 0.75))
            },
            "observed_at": curves[0]["observed_at"],
            "held_out_accuracy": {
                name: _rounded(_quantile(held, q)) for name, q in (("low", 0.25), ("median", 0.5), ("high", 0.75))
            },
            "gradient_norm": norms,
            # by observation and layer, the mean over seeds and heads; heads apart for the first seed
            "entropy": [
                [
                    _number(float(np.nanmean([_floats(e[t][layer]) for e in entropy])))
                    for layer in range(len(entropy[0][0]))
                ]
                for t in range(len(entropy[0]))
            ]
            if entropy
            else [],
            "entropy_by_head": [[list(layer) for layer in step] for step in entropy[0][-1:]] if entropy else [],
        },
        "attention": records[0].get("attention"),
    }


def _floats(values: Sequence[float | None]) -> list[float]:
    return [np.nan if v is None else v for v in values]


def _quantile(values: np.ndarray[Any, Any], q: float) -> np.ndarray[Any, Any]:
    # a run that is no longer finite counts as larger than any other, so that a median hides no divergence
    return np.quantile(np.where(np.isnan(values), np.inf, values), q, axis=0, method="nearest")


def _mean_over(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    filled = np.where(np.isnan(values), np.inf, values)
    return filled.mean(axis=0)


def _rounded(values: np.ndarray[Any, Any]) -> list[float | None]:
    return [_number(float(f"{v:.4g}")) for v in values]


def _number(value: float) -> float | None:
    return round(float(value), 5) if np.isfinite(value) else None


def exact_checks(study: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return every theorem checked in a study's record, one entry a row."""
    return [
        {"task": row["task"], "variant": row["variant"], "theorem": name, **check}
        for row in study["rows"]
        for name, check in row["checks"].items()
    ]

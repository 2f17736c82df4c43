"""From stored trials to the record that reports are made of: `veriformer-ablation/1`."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from veriformer.ablations.execution.plan import Grouping
from veriformer.ablations.statistics.paired import ALPHA, smallest_p
from veriformer.ablations.studies.study import Setting, Study, Variant
from veriformer.ablations.tasks import Task
from veriformer.ablations.trials.own import plain
from veriformer.ablations.verdicts.beside import answer, beside
from veriformer.ablations.verdicts.costs import cost_of
from veriformer.ablations.verdicts.families import TESTS, Families, claim_of, number_of_tests
from veriformer.ablations.verdicts.notes import notes
from veriformer.ablations.verdicts.predictions import outcome
from veriformer.ablations.verdicts.rows import Row, compare, describe

FORMAT = "veriformer-ablation/1"

Found = Mapping[str, Mapping[str, Any]]
"""Records of finished trials by key."""


def versions() -> dict[str, str]:
    """Return what the numbers depend on besides the code."""
    return {"torch": torch.__version__, "python": platform.python_version(), "machine": platform.machine()}


def commit() -> str | None:
    """Return the commit of the checkout that this code is, `+` where files were changed; None if it is installed."""
    root = Path(__file__).resolve().parents[2]

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(root), *words], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")).resolve() != root:
            return None
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def warnings_before(study: Study, seeds: int) -> list[str]:
    """Return what must be said before a study runs: too few seeds for any verdict."""
    tests = number_of_tests(study)
    if tests and tests * smallest_p(seeds) > ALPHA:
        enough = next((n for n in range(1, 64) if tests * smallest_p(n) <= ALPHA), None)
        advice = f"give --seeds {enough} or more" if enough else "make studies of fewer rows"
        return [
            f"{study.name}: {seeds} seeds cannot reach a verdict; the smallest p is {smallest_p(seeds):.2g} and "
            f"there are up to {tests} tests (Holm), so nothing but theorems will be decided; {advice}"
        ]
    return []


@dataclass(frozen=True)
class _Place:
    """Where a row stands in its study."""

    task: str
    setting: Setting
    variant: Variant


def summarise(studies: Sequence[Study], seeds: int, grouping: Grouping, found: Found) -> list[dict[str, Any]]:
    """Return the studies' parts of the record; rows with trials missing are left out and counted."""
    families = Families.of(studies)
    tables = [_table(study, seeds, grouping, found, families) for study in studies]
    compare([row for rows, _ in tables for row, _ in rows], families.sizes)
    return [
        _told(study, rows, missing, seeds, grouping, families)
        for study, (rows, missing) in zip(studies, tables, strict=True)
    ]


def _table(
    study: Study, seeds: int, grouping: Grouping, found: Found, families: Families
) -> tuple[list[tuple[Row, _Place]], int]:
    """Return the rows of a study whose trials all are there, and how many trials are missing."""
    rows: list[tuple[Row, _Place]] = []
    missing = 0
    for task, setting, variant in study.rows():
        records = _records(study, task, setting, variant, seeds, grouping, found)
        base = study.variants[0]
        against = None if variant is base else _records(study, task, setting, base, seeds, grouping, found)
        missing += seeds - len(records)
        if len(records) == seeds and (against is None or len(against) == seeds):
            forced = study.is_forced(task, setting, variant)
            row = Row(study.task(task), setting.name, variant.name, records, against, forced)
            if against is not None and not forced:
                row.claim = claim_of(study, task, setting, variant)
                row.family = families.owner[row.claim]
            rows.append((row, _Place(task, setting, variant)))
    return rows, missing


def _told(
    study: Study, rows: Sequence[tuple[Row, _Place]], missing: int, seeds: int, grouping: Grouping, families: Families
) -> dict[str, Any]:
    told = []
    for row, place in rows:
        trial = study.trial(place.task, place.setting, place.variant, grouping.first_seed, grouping.device)
        spoken = [p for p in study.predictions if p.speaks_of(place.task, place.setting.name, place.variant.name)]
        predictions = [
            {"expects": p.expects, "source": p.source, "registered": p.registered, "theorem": p.theorem,
             "outcome": outcome(p, row)}
            for p in spoken
        ]  # fmt: skip
        told.append({**describe(row), "predictions": predictions, **cost_of(trial), **_curves(row.records),
                     **beside(row.records, study.fit)})  # fmt: skip
    here = {row.claim for row, _ in rows if row.family == study.name}
    tests = families.sizes.get(study.name, 0)
    return {
        "name": study.name,
        "question": study.question,
        "source": study.source,
        "base": study.variants[0].name,
        "config": plain(study.config),
        "recipe": _plain(study),
        "notes": notes(study, [row for row, _ in rows]),
        "own": _own(study),
        "variants": [{"name": v.name, "removes": v.removes} for v in study.variants],
        "tasks": [_about(study.task(name)) for name in study.tasks],
        "tests": tests,
        "untested": tests - TESTS * len(here),
        "warnings": warnings_before(study, seeds),
        "missing": missing,
        "noise": _noise([row for row, _ in rows]),
        "rows": told,
        "fit": answer(study, told) if study.fit and told else None,
    }


def _records(
    study: Study, task: str, setting: Setting, variant: Variant, seeds: int, grouping: Grouping, found: Found
) -> list[Mapping[str, Any]]:
    keys = [key for job in grouping.jobs(study, task, setting, variant, seeds) for key in job.keys]
    return [found[key] for key in keys if key in found]


def _own(study: Study) -> list[str]:
    """Return what of a study is somebody's own rather than ours: model, data, optimizer, step."""
    parts = {
        "model": study.build is not None or any(v.build for v in study.variants),
        "data": any(study.task(name).data is not None for name in study.tasks),
        "optimizer": study.optimizer is not None or any(v.optimizer for v in study.variants),
        "step": study.step is not None,
    }
    return [name for name, is_own in parts.items() if is_own]


def _plain(study: Study) -> dict[str, Any]:
    return {name: getattr(study.recipe, name) for name in study.recipe.__dataclass_fields__}


def _about(task: Task) -> dict[str, Any]:
    return {
        "name": task.name, "statement": task.statement, "chance": _known(task.chance), "best": _known(task.best),
        "needs": list(task.needs), "length": task.length, "vocab_size": task.vocab_size, "loss_floor": task.loss_floor,
        "metric": task.metric_name, "lower_is_better": bool(task.lower_is_better), "margin": _known(task.margin),
    }  # fmt: skip


def _known(value: float) -> float | None:
    return value if np.isfinite(value) else None


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
        if all(part in c["gradient_norm"] for c in curves)  # of an own model, a part may be left out for some seeds
    }
    entropy = [c["entropy"] for c in curves if c["entropy"] and c["entropy"][0]]
    entropy = [e for e in entropy if _sizes(e) == _sizes(entropy[0])]
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
        "tokens": records[0].get("tokens"),
    }


def _sizes(entropy: Sequence[Sequence[Sequence[Any]]]) -> list[list[int]]:
    return [[len(heads) for heads in step] for step in entropy]


def _floats(values: Sequence[float | None]) -> list[float]:
    return [np.nan if v is None else v for v in values]


def _quantile(values: np.ndarray[Any, Any], q: float) -> np.ndarray[Any, Any]:
    # a run that is no longer finite counts as larger than any other, so that a median hides no divergence
    return np.quantile(np.where(np.isnan(values), np.inf, values), q, axis=0, method="nearest")


def _mean_over(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    filled = np.where(np.isnan(values), np.inf, values)
    return filled.mean(axis=0)


def _rounded(values: np.ndarray[Any, Any]) -> list[float | None]:
    return [float(f"{v:.4g}") if np.isfinite(v) else None for v in values]


def _number(value: float) -> float | None:
    return round(float(value), 5) if np.isfinite(value) else None


def exact_checks(study: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return every theorem checked in a study's record, one entry a row."""
    return [
        {"task": row["task"], "variant": row["variant"], "theorem": name, **check}
        for row in study["rows"]
        for name, check in row["checks"].items()
    ]

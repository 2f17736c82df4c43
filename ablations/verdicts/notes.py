"""What is to be said of how a study of one's own was run: seeds one by one, other starts, what was not measured."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from veriformer.ablations.execution.plan import FIRST_SEED, apart
from veriformer.ablations.studies.study import Study, Variant
from veriformer.ablations.training.own.differences import differences, untrained
from veriformer.ablations.training.own.soundness import soundness
from veriformer.ablations.trials.own import at_home, parts_of
from veriformer.ablations.trials.own_process import asked_apart
from veriformer.ablations.trials.trial import Trial
from veriformer.ablations.verdicts.learning import of_the_curves
from veriformer.ablations.verdicts.rows import Row

_LUCK = 0.05
"""Share of the way from chance to the best by which held-out samples may flatter a model."""


def notes(study: Study, rows: Sequence[Row]) -> list[str]:
    """Return what is to be said of the rows of a study of one's own, each with the variants that it is said of."""
    if study.code is None:
        return []
    found: dict[str, list[str]] = {}
    for line, variant in [*_of_the_code(study, rows), *_of_the_records(rows)]:
        found.setdefault(line, []).append(variant)
    every = len({row.variant for row in rows})
    told = {line: list(dict.fromkeys(variants)) for line, variants in found.items()}
    return [line if len(names) == every else f"{', '.join(names)}: {line}" for line, names in told.items()]


def _of_the_code(study: Study, rows: Sequence[Row]) -> Iterator[tuple[str, str]]:
    shown = {(row.task.name, row.setting, row.variant) for row in rows}
    base = study.variants[0]
    parted = {name for name in study.tasks if study.task(name).is_parted}
    for task, setting, variant in study.rows():
        if task in parted:
            yield f"{task} was given no held_out: a fifth of its data was kept from training", variant.name
        if (task, setting.name, variant.name) not in shown:
            continue
        trial = study.trial(task, setting, variant, 0)
        if variant is base:
            one, other = (study.trial(task, setting, variant, FIRST_SEED + i) for i in range(2))
            for line in _soundness(one, other):
                yield line, variant.name
        if why := apart(trial):
            yield f"seeds are trained one by one: {why}", variant.name
        for line in _beside(study, trial, study.trial(task, setting, base, 0), variant):
            yield line, variant.name


def _soundness(trial: Trial, other: Trial) -> list[str]:
    def ask() -> list[str]:
        with at_home(trial), torch.random.fork_rng(devices=[]):
            return soundness(parts_of(trial), trial, other)

    return asked_apart(ask, [])  # what is wrong with the code was told where it was trained


def _beside(study: Study, trial: Trial, base: Trial, variant: Variant) -> list[str]:
    """Return what else than its change a variant has otherwise than the base, and what its optimizer leaves out."""
    first = study.variants[0]
    own, usual = ((v.config, v.build, v.edits) for v in (variant, first))

    def ask() -> list[str]:
        with at_home(trial), torch.random.fork_rng(devices=[]):
            parts = parts_of(trial)
            left_out = untrained(parts, trial)
            if variant is first:
                return left_out
            return [*differences(parts, trial, parts_of(base), base, is_other_model=own != usual), *left_out]

    return asked_apart(ask, [])


def _outcome(record: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(record[name] for name in ("accuracy", "loss", "loss_area", "max_loss"))


def _place(row: Row) -> tuple[str, str]:
    return row.task.name, row.setting


def _passes_best(row: Row) -> float | None:
    """Return the metric of a seed that is better than what cannot be passed, by more than luck; None: none is."""
    best, chance = row.task.best, row.task.chance
    values = row.values("accuracy")
    found = min(values) if row.task.lower_is_better else max(values)
    beyond = best - found if row.task.lower_is_better else found - best
    scale = abs(best - chance) if math.isfinite(chance) else abs(best)
    return found if beyond > _LUCK * scale else None  # nan where the best is not known: nothing is


def _of_the_records(rows: Sequence[Row]) -> Iterator[tuple[str, str]]:
    first: dict[tuple[object, ...], str] = {}
    passed = {id(row): _passes_best(row) for row in rows}
    full = {
        place: all(row.at_ceiling and passed[id(row)] is None for row in rows if _place(row) == place)
        for place in map(_place, rows)
    }
    for row in rows:
        task, beyond = row.task, passed[id(row)]
        for told in of_the_curves(row):
            yield told, row.variant
        if full[_place(row)] and len(rows) > 1:
            told = (
                f"{task.name}: every seed of every variant is as good as can be, so that nothing can be told apart: is "
                "the task too easy, or is the answer in the inputs?"
            )
            yield told, row.variant
        if beyond is not None:
            told = (
                f"{task.name}: a seed has {task.metric_name} {beyond:.4g}, beyond the best that the task names, "
                f"{task.best:.4g}: is one of them in per cent?"
            )
            yield told, row.variant
        twin = first.setdefault((row.task.name, row.setting, *map(_outcome, row.records)), row.variant)
        if twin != row.variant:
            yield (
                f"every seed came out exactly the same as {twin}'s, to the last digit: does its change reach it?",
                row.variant,
            )
        for record in row.records:
            for line in record.get("blind", ()):
                yield f"not measured: {line}", row.variant
            if record.get("apart"):
                yield f"seeds were trained one by one: {record['apart']}", row.variant

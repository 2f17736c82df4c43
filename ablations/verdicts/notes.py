"""What is to be said of how a study of one's own was run: seeds one by one, other starts, what was not measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from veriformer.ablations.execution.plan import apart
from veriformer.ablations.studies.study import Setting, Study
from veriformer.ablations.training.own.feeding import repeats
from veriformer.ablations.trials.own import at_home, parts_of
from veriformer.ablations.trials.own_process import asked_apart
from veriformer.ablations.trials.trial import Trial
from veriformer.ablations.verdicts.costs import same_start
from veriformer.ablations.verdicts.rows import Row


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
        if variant is base and not _repeats(trial):
            yield (
                (
                    f"{task} gave other data when it was asked again for the same seed: variants are not trained on "
                    "the same, and their seeds are no pairs; draw from a generator of the seed"
                ),
                variant.name,
            )
        if why := apart(trial):
            yield f"seeds are trained one by one: {why}", variant.name
        share = 1.0 if variant is base else same_start(trial, study.trial(task, setting, base, 0))
        if share is not None and share < 1:
            yield _of_the_start(share, setting), variant.name


def _repeats(trial: Trial) -> bool:
    def ask() -> bool:
        with at_home(trial), torch.random.fork_rng(devices=[]):
            return repeats(parts_of(trial), trial, torch.device("cpu"))

    return asked_apart(ask, True)  # what is wrong with the code was told where it was trained


def _outcome(record: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(record[name] for name in ("accuracy", "loss", "loss_area", "max_loss"))


def _of_the_start(share: float, setting: Setting) -> str:
    where = f" ({setting.name})" if setting.name else ""
    return f"{share:.0%} of the parameters start as the base's of the same seed do{where}; the data is the same for all"


def _of_the_records(rows: Sequence[Row]) -> Iterator[tuple[str, str]]:
    first: dict[tuple[object, ...], str] = {}
    for row in rows:
        twin = first.setdefault((row.task.name, row.setting, *map(_outcome, row.records)), row.variant)
        if twin != row.variant:
            yield (
                f"every seed came out as those of {twin} did, to the last digit: does its change reach it?",
                row.variant,
            )
        for record in row.records:
            for line in record.get("blind", ()):
                yield f"not measured: {line}", row.variant
            if record.get("apart"):
                yield f"seeds were trained one by one: {record['apart']}", row.variant

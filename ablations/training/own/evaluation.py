"""What makes an own study's metric say less than it seems to: few samples, one answer, other numbers each time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from veriformer.ablations.tasks.task import IGNORED, Task
from veriformer.ablations.training.own.building import built
from veriformer.ablations.training.own.feeding import held_out_batches
from veriformer.ablations.training.own.losses import samples_in, tested_on
from veriformer.ablations.trials.own import Parts
from veriformer.ablations.trials.trial import Trial

_FEW_SAMPLES = 50
"""Held-out samples below which a share of them moves in steps of two points or more."""

_LOOKED_AT = 64
"""Held-out batches that are gone through to count samples and labels."""

_MORE_THAN_CHANCE = 0.05
"""By how much one constant answer may be better than the chance that is declared, beyond the scatter of labels."""

_CPU = torch.device("cpu")


def of_the_evaluation(parts: Parts, trial: Trial) -> Iterator[str]:
    """Yield, in sentences, what is to be known of what a study's metric is measured on.

    Args:
        parts: of the study.
        trial: of the base.

    Raises:
        OwnCodeError: the user's code raised.
    """
    batches = list(islice(held_out_batches(parts.task, _CPU), _LOOKED_AT))
    yield from _of_the_samples(parts.task, batches)
    yield from _of_the_labels(parts.task, batches)
    yield from _of_repetition(parts, trial, batches[:1])


def _of_the_samples(task: Task, batches: list[Any]) -> Iterator[str]:
    count = int(sum(samples_in(batch) for batch in batches))
    if len(batches) < _LOOKED_AT and count < _FEW_SAMPLES:
        yield (
            f"{task.name}: the {task.metric_name} is measured on {count} held-out samples: a share of them moves in "
            f"steps of {1 / max(1, count):.2g}; give more held-out samples"
        )


def _of_the_labels(task: Task, batches: list[Any]) -> Iterator[str]:
    """Hold the chance that is declared against the best constant answer, where a batch has one class a sample."""
    labels = [y for batch in batches if (y := _labels(batch)) is not None]
    if not labels or not math.isfinite(task.chance) or not 0 < task.chance < 1:
        return
    every = torch.cat(labels)
    every = every[every != IGNORED]
    values, counts = every.unique(return_counts=True)
    if len(every) < _FEW_SAMPLES or len(values) < 2:
        return
    share = float(counts.max() / len(every))
    scatter = 3 * math.sqrt(task.chance * (1 - task.chance) / len(every))  # of the share of one label, by luck
    if share < task.chance - _MORE_THAN_CHANCE - scatter:
        yield (
            f"{task.name}: chance is given as {task.chance:.4g}, and no constant answer is right in over {share:.0%} "
            "of the held-out samples: is it that of another number of classes? What learns may count as dead"
        )
    if share > task.chance + _MORE_THAN_CHANCE + scatter:
        yield (
            f"{task.name}: always the same answer, the most frequent label {int(values[counts.argmax()])}, is right "
            f"in {share:.0%} of the held-out samples, and chance is given as {task.chance:.4g}: what guesses counts as "
            "trained"
        )


def _labels(batch: Any) -> Tensor | None:
    found = (
        batch.get("labels") if isinstance(batch, Mapping) else batch[-1] if isinstance(batch, tuple | list) else None
    )
    if not isinstance(found, Tensor) or found.ndim != 1 or found.is_floating_point() or found.is_complex():
        return None
    return found.long()


def _of_repetition(parts: Parts, trial: Trial, batches: list[Any]) -> Iterator[str]:
    """Measure one model twice on the same batch, with other random numbers."""
    model, found = built(parts, trial, _CPU).eval(), []
    for seed in (1, 2):
        for batch in batches:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                found.append(tested_on(model, batch, parts.task)[:2])
    if len(found) == 2 and any(a != b for a, b in zip(*found, strict=True) if math.isfinite(a) and math.isfinite(b)):
        yield (
            f"{parts.task.name}: the same model in eval mode gives another loss or metric when it is evaluated again: "
            "is dropout, or another random part, at work in evaluation?"
        )

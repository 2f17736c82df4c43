"""What an own trial trains on and is tested on, batch by batch: drawn samples of a task, or somebody's own data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from veriformer.ablations.tasks import Task
from veriformer.ablations.tasks.batches import TESTED_TOGETHER, batches, held_out
from veriformer.ablations.training.own.blame import doing
from veriformer.ablations.training.own.losses import on_device
from veriformer.ablations.training.samples import HELD_OUT, HELD_OUT_SEED, training_data
from veriformer.ablations.trials.own import Parts
from veriformer.ablations.trials.trial import Trial


def training_batches(task: Task, trial: Trial, device: torch.device) -> Iterator[Any]:
    """Yield the batches that a trial trains on; of the seed alone, the same for every variant."""
    recipe = trial.recipe
    if task.sample is not None:
        data = training_data(task, recipe, trial.seed)
        for start in range(0, recipe.steps * recipe.batch_size, recipe.batch_size):
            part = data.slice(start, start + recipe.batch_size)
            yield on_device((*part.inputs, part.labels), device)
        return
    for batch in batches(task, trial.seed, recipe.batch_size):
        yield on_device(batch, device)


def held_out_batches(task: Task, device: torch.device, length: int | None = None) -> Iterator[Any]:
    """Yield the batches that are never trained on; at another length for a task that draws samples."""
    if task.sample is not None:
        number = HELD_OUT if length is None else HELD_OUT // 4
        data = task.draw(HELD_OUT_SEED, number, length)
        for start in range(0, number, TESTED_TOGETHER):
            part = data.slice(start, start + TESTED_TOGETHER)
            yield on_device((*part.inputs, part.labels), device)
        return
    for batch in held_out(task):
        yield on_device(batch, device)


def first_batches(parts: Parts, trials: Sequence[Trial], device: torch.device) -> list[Any]:
    """Return the first training batch of each seed.

    Raises:
        OwnCodeError: the data raised.
    """
    found = []
    for trial in trials:
        with doing("getting batch 0", trial):
            found.append(next(training_batches(parts.task, trial, device)))
    return found


def repeats(parts: Parts, trial: Trial, device: torch.device) -> bool:
    """Return whether the data of a seed are the same when they are asked for again, as every variant asks for them."""
    first, again = (pytree.tree_flatten(first_batches(parts, [trial], device))[0] for _ in range(2))
    if len(first) != len(again):
        return False
    return all(
        torch.equal(one, other) if isinstance(one, Tensor) and isinstance(other, Tensor) else type(one) is type(other)
        for one, other in zip(first, again, strict=True)
    )

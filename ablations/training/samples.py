"""What a stack trains on, is watched on and is tested on; the same samples for every variant."""

from __future__ import annotations

import torch

from veriformer.ablations.tasks import Samples, Task
from veriformer.ablations.trials.recipe import Recipe

HELD_OUT, PROBED = 1024, 64
"""Samples of the final test, and of the tests on the way."""

HELD_OUT_SEED = 2**40
"""Training data comes from the trials' own seeds, which are smaller."""


def training_data(task: Task, recipe: Recipe, seed: int) -> Samples:
    """Return all samples of a seed; the same ones for every variant."""
    total = recipe.steps * recipe.batch_size
    if not recipe.num_samples:
        return task.draw(seed, total)
    fixed = task.draw(seed, recipe.num_samples)
    order = torch.randint(recipe.num_samples, (total,), generator=torch.Generator().manual_seed(seed))
    return Samples(tuple(x[order] for x in fixed.inputs), fixed.labels[order])


def shared(samples: Samples, seeds: int, device: torch.device) -> Samples:
    """Show the same samples to every seed of a stack."""
    spread = tuple(x.to(device).expand(seeds, *x.shape) for x in samples.inputs)
    return Samples(spread, samples.labels.to(device).expand(seeds, *samples.labels.shape))

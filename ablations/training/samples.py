"""What a stack trains on, is watched on and is tested on; the same samples for every variant."""

from __future__ import annotations

import torch

from veriformer.ablations.tasks import IGNORED, Samples, Task
from veriformer.ablations.tasks.masked import hide
from veriformer.ablations.trials.recipe import Recipe

HELD_OUT, PROBED = 1024, 64
"""Samples of the final test, and of the tests on the way."""

HELD_OUT_SEED = 2**40
"""Training data comes from the trials' own seeds, which are smaller."""


def training_data(task: Task, recipe: Recipe, seed: int) -> Samples:
    """Return all samples of a seed; the same ones for every variant."""
    total = recipe.steps * recipe.batch_size
    if recipe.num_samples:
        fixed = task.draw(seed, recipe.num_samples)
        order = torch.randint(recipe.num_samples, (total,), generator=torch.Generator().manual_seed(seed))
        data = Samples(tuple(x[order] for x in fixed.inputs), fixed.labels[order])
    else:
        data = task.draw(seed, total)
    return data if recipe.objective == "task" else _asked_otherwise(data, recipe, seed)


def _asked_otherwise(data: Samples, recipe: Recipe, seed: int) -> Samples:
    """Show the hidden tokens again, and ask for every next one, or for a random share of all, which is hidden."""
    whole = torch.where(data.labels == IGNORED, data.inputs[0], data.labels)
    if recipe.objective == "next":
        labels = whole.clone()
        labels[:, 0] = IGNORED  # nothing stands before it
        return Samples((whole,), labels)
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.rand(whole.shape, generator=generator) < recipe.mask_share
    place = torch.randint(whole.shape[1], (len(whole), 1), generator=generator)
    hidden |= (torch.arange(whole.shape[1]) == place) & ~hidden.any(dim=1, keepdim=True)  # one at least
    return hide(whole, hidden)


def shared(samples: Samples, seeds: int, device: torch.device) -> Samples:
    """Show the same samples to every seed of a stack."""
    spread = tuple(x.to(device).expand(seeds, *x.shape) for x in samples.inputs)
    return Samples(spread, samples.labels.to(device).expand(seeds, *samples.labels.shape))

"""How much memory a stack takes, so that it can be split before it fails."""

from __future__ import annotations

import json

from veriformer.ablations.tasks import TASKS
from veriformer.ablations.training.stacking import build_one
from veriformer.ablations.trials.trial import Trial

FLOAT = 4
"""Bytes of a float32, in which everything is trained."""


def bytes_per_seed(trial: Trial) -> int:
    """Estimate what one seed of a trial takes while it trains.

    Parameters four times (value, gradient, two moments); what the backward keeps of each layer: some 20 vectors of
    width D a token (inputs of the four projections, two norms, two skips, the 4 D wide inner layer twice) and four T^2
    matrices a head (scores, masked scores, exponentials, weights); data; and the larger batch of the final test.
    """
    task, recipe, config = TASKS[trial.task], trial.recipe, trial.config
    parameters = _parameters(json.dumps([trial.task, trial.config, trial.edits]), trial)
    samples = task.draw(0, 2)
    length = samples.inputs[0].shape[1]
    width, heads = config.get("d_model", 32), config.get("num_heads", 4)
    layers = config.get("num_layers", 2) * (3 if task.architecture == "encoder_decoder" else 1)
    a_sample = layers * (20 * length * width + 4 * heads * length**2) + 4 * length * task.vocab_size
    tested = 256 * (6 * length * width + 4 * heads * length**2)
    data = recipe.steps * recipe.batch_size * sum(x[0].numel() * x.element_size() for x in samples.inputs)
    return FLOAT * (4 * parameters + max(recipe.batch_size * a_sample, tested)) + data


_COUNTED: dict[str, int] = {}


def _parameters(key: str, trial: Trial) -> int:
    """Count once for all seeds and learning rates."""
    if key not in _COUNTED:
        _COUNTED[key] = sum(p.numel() for p in build_one(trial).parameters())
    return _COUNTED[key]


def fitting_width(trial: Trial, most: float) -> int:
    """Return how many seeds fit into `most` bytes, at least one."""
    return max(1, int(most // bytes_per_seed(trial)))

"""The untrained model of an own trial."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from veriformer.ablations.tasks.batches import drawing
from veriformer.ablations.training.own.blame import doing
from veriformer.ablations.training.own.feeding import training_batches
from veriformer.ablations.training.own.losses import trained_on
from veriformer.ablations.trials.own import Parts
from veriformer.ablations.trials.trial import Trial


def built(parts: Parts, trial: Trial, device: torch.device) -> nn.Module:
    """Return the untrained model of a trial, on its device.

    Raises:
        OwnCodeError: it could not be built, or has nothing that could be trained.
    """
    with doing("building the model", trial):
        model = parts.model(trial.seed).to(device)
        if any(isinstance(p, UninitializedParameter) for p in model.parameters()):  # LazyLinear and its like
            with drawing(trial.seed, -1), torch.no_grad():
                trained_on(model, next(training_batches(parts.task, trial, device)), parts.task, 0.0)
        if parts.step is None and not any(p.requires_grad for p in model.parameters()):
            raise ValueError(f"{type(model).__name__} has no parameter that could be trained")
    return model

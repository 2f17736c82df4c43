"""What a trial's model costs: parameters, and FLOPs of a step."""

from __future__ import annotations

import functools
import json
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from veriformer.ablations.tasks import TASKS
from veriformer.ablations.training.own.building import built
from veriformer.ablations.training.own.feeding import first_batches
from veriformer.ablations.training.own.losses import trained_on
from veriformer.ablations.training.stacking import build_one
from veriformer.ablations.trials.own import at_home, parts_of
from veriformer.ablations.trials.own_process import asked_apart
from veriformer.ablations.trials.trial import Trial
from veriformer.reference.config import Config
from veriformer.reference.counting import count_flops

BACKWARD = 2
"""A backward pass multiplies twice for each product of the forward: by the weights and by the inputs."""


def cost_of(trial: Trial) -> dict[str, int | None]:
    """Return the parameters of the model and the FLOPs of one training step of one seed (forward and backward).

    Of an own model they are counted as they happen; None for what cannot be counted.
    """
    if trial.own is not None:
        return asked_apart(lambda: _own_cost(trial), {"parameters": None, "flops": None})
    return _cost(trial.task, json.dumps(dict(trial.config)), trial.edits, trial.recipe.batch_size)


@functools.lru_cache(maxsize=512)
def _cost(task_name: str, config: str, edits: tuple[str, ...], batch: int) -> dict[str, int | None]:
    task, given = TASKS[task_name], json.loads(config)
    trial = Trial(task=task_name, config=given, edits=edits)
    model = build_one(trial)
    inputs = task.draw(0, 2).inputs
    if task.model == "reference" and not edits:
        lengths: dict[str, Any] = {"length": inputs[-1].shape[1]}
        if task.architecture == "encoder_decoder":
            lengths["source_length"] = inputs[0].shape[1]
        flops = count_flops(Config(**given), batch, **lengths).total
    else:  # parts were taken out: the products that are left are counted as they happen
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(*inputs)
        flops = counter.get_total_flops() * batch // 2
    return {"parameters": sum(p.numel() for p in model.parameters()), "flops": (1 + BACKWARD) * flops}


def _own_cost(trial: Trial) -> dict[str, int | None]:
    cost: dict[str, int | None] = {"parameters": None, "flops": None}
    with at_home(trial), torch.random.fork_rng(devices=[]):
        try:
            parts = parts_of(trial)
            model = built(parts, trial, torch.device("cpu"))
            cost["parameters"] = sum(p.numel() for p in model.parameters())
            (batch,) = first_batches(parts, [trial], torch.device("cpu"))
            if parts.step is None:
                with FlopCounterMode(display=False) as counter, torch.no_grad():
                    trained_on(model, batch, parts.task, 0.0)
                cost["flops"] = (1 + BACKWARD) * counter.get_total_flops()
        except Exception:  # what is wrong with the code was told where it was trained
            return cost
    return cost

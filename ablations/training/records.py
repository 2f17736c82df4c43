"""What is written down of each seed of a trained stack: how it did, what went wrong, curves, theorems."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor

from veriformer.ablations.tasks import TASKS, Samples, Task
from veriformer.ablations.training.exactness import CHECKS
from veriformer.ablations.training.heads import costs_of_heads
from veriformer.ablations.training.observation import Log
from veriformer.ablations.training.samples import HELD_OUT, HELD_OUT_SEED, shared
from veriformer.ablations.training.scores import calibration_error, logits_of, loss_and_accuracy, overconfidence
from veriformer.ablations.training.stacking import Stack
from veriformer.ablations.trials.recipe import Recipe
from veriformer.ablations.trials.trial import Trial

CURVE_POINTS, CHECKED = 50, 64
"""Points of a curve, and inputs of a theorem."""

SPIKE, DIVERGED, WINDOW = 10.0, 10.0, 25
"""A loss ten times its running median (of the last 25 steps) and above that of guessing is a spike; one after warm-up
ten times the first is divergence."""


@torch.no_grad()
def records_of(stack: Stack, log: Log) -> list[dict[str, Any]]:
    """Return one record a seed, in order, of a stack that was trained and is in eval mode."""
    trials, first = stack.trials, stack.trials[0]
    task, device = TASKS[first.task], torch.device(first.device)
    held_out = shared(task.draw(HELD_OUT_SEED, HELD_OUT), len(trials), device)
    logits = logits_of(stack, held_out)
    loss, accuracy = loss_and_accuracy(logits, held_out.labels)
    error, over = calibration_error(logits, held_out.labels), overconfidence(logits, held_out.labels)
    elsewhere = {}
    for length in first.lengths:
        other = shared(task.draw(HELD_OUT_SEED, HELD_OUT // 4, length), len(trials), device)
        elsewhere[str(length)] = loss_and_accuracy(logits_of(stack, other), other.labels)[1].tolist()
    sample = stack.with_weights(*(x[:, :1] for x in held_out.inputs))[1]
    heads = costs_of_heads(stack, held_out) if first.heads else {}
    losses, accuracies = log.losses.double().cpu(), log.accuracies.double().cpu()
    areas = loss_areas(log)
    records = []
    for index, trial in enumerate(trials):
        record: dict[str, Any] = {
            "accuracy": accuracy[index].item(),
            "loss": finite_or_none(loss[index].item()),
            "calibration_error": finite_or_none(error[index].item()),
            "overconfidence": finite_or_none(over[index].item()),
            "loss_area": finite_or_none(areas[index].item()),
            **events(losses[:, index], accuracies[:, index], trial.recipe, task),
            "lengths": {length: values[index] for length, values in elsewhere.items()},
            "curves": curves_of(log, losses[:, index], accuracies[:, index], index),
            "checks": _verify(stack, trial, index, held_out),
        }
        if heads:
            record["heads"] = {what: rounded(costs[index]) for what, costs in heads.items()}
        if index == 0:
            record["attention"] = [[rounded(head) for head in layer[0, 0].tolist()] for layer in sample]
            record["tokens"] = [_symbols(task, x[0, 0]) for x in held_out.inputs if not x.is_floating_point()]
        records.append(record)
    return records


def loss_areas(log: Log) -> Tensor:
    """Return the area under each seed's held-out loss over the number of steps, `[seeds]` float64, nats.

    In eval mode and of hard targets, so that label smoothing and dropout, which raise the loss that is trained on, are
    not taken for slowness.
    """
    losses = torch.stack(log.tests).double().cpu()
    return torch.trapezoid(losses, torch.tensor(log.tested_at, dtype=torch.float64), dim=0) / log.tested_at[-1]


def _symbols(task: Task, tokens: Tensor) -> list[str]:
    """Return what the tokens of one sample are called on the axes of its attention."""
    return [task.symbols[t] if t < len(task.symbols) else str(t) for t in tokens.tolist()]


_KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("accuracy", "seconds"), (int, float)),
    **dict.fromkeys(("loss", "calibration_error", "loss_area", "max_loss"), (int, float, type(None))),
    "spikes": (int,), "stack": (int,), "diverged": (str, type(None)), "steps_to_95": (int, type(None)),
    "lengths": (dict,), "curves": (dict,), "checks": (dict,),
}  # fmt: skip


def is_whole(record: dict[str, Any]) -> bool:
    """Whether a stored record has all that training writes, each of its kind."""
    return all(type(record.get(name, ...)) in kinds for name, kinds in _KINDS.items())


def finite_or_none(value: float) -> float | None:
    """Return a number, or None for what JSON has no word for."""
    return value if math.isfinite(value) else None


def rounded(values: list[Any]) -> list[Any]:
    """Return numbers as they are kept of curves and pictures; None for what is not finite."""
    return [rounded(v) if isinstance(v, list) else round(v, 4) if math.isfinite(v) else None for v in values]


def events(losses: Tensor, accuracies: Tensor, recipe: Recipe, task: Task) -> dict[str, Any]:
    """Spikes, divergence, steps to 95 % of the best: of the raw training loss, nothing smoothed away."""
    finite = torch.isfinite(losses)
    worst = losses[finite].max().item() if bool(finite.any()) else None
    # nobody knows what guessing costs in a loss of one's own, which may be negative: the first one stands for it
    spikes, guessing = 0, math.log(1 / task.chance) if task.loss is None else abs(losses[0].item())
    for step in range(WINDOW, len(losses)):
        before = losses[step - WINDOW : step]
        spikes += bool(losses[step] > max(SPIKE * before.nanmedian().item(), guessing)) or not bool(finite[step])
    after = losses[recipe.warm_up :]
    last = losses[-min(WINDOW, len(losses)) :].mean().item()
    why = None
    if not bool(finite.all()):
        why = "the loss was not finite"
    elif bool((after > DIVERGED * losses[0].abs()).any()):
        why = "the loss rose above ten times the first"
    elif last > 2 * guessing:
        why = f"the last loss is above twice {'that of guessing' if task.loss is None else 'the first'}"
    smooth = accuracies.unfold(0, min(10, len(accuracies)), 1).mean(dim=1)
    wanted = task.chance + 0.95 * (task.best - task.chance)
    reached = (smooth >= wanted).nonzero()
    return {
        "max_loss": worst,
        "spikes": int(spikes),
        "diverged": why,
        "steps_to_95": int(reached[0]) + min(10, len(accuracies)) if len(reached) else None,
    }


def curves_of(log: Log, losses: Tensor, accuracies: Tensor, index: int) -> dict[str, Any]:
    """Return what is drawn over the steps of one seed, from its losses and accuracies by step."""
    edges = [round(i * len(losses) / CURVE_POINTS) for i in range(CURVE_POINTS + 1)]
    bins = [(a, b) for a, b in itertools.pairwise(edges) if b > a]
    return {
        "step": [b for _, b in bins],
        "loss": [_significant(losses[a:b].mean().item(), 6) for a, b in bins],
        "accuracy": rounded([accuracies[a:b].mean().item() for a, b in bins]),
        "observed_at": log.at,
        "held_out_accuracy": rounded([a[index].item() for a in log.probed]),
        "gradient_norm": {
            part: [_significant(step[part][index].item()) for step in log.norms]
            for part in (log.norms[0] if log.norms else ())
        },
        "entropy": [[rounded(layer[index].tolist()) for layer in step] for step in log.entropies],
    }


def _significant(value: float, digits: int = 4) -> float | None:
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None


def _verify(stack: Stack, trial: Trial, index: int, samples: Samples) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in trial.checks:
        model = stack.one(index).double()
        inputs = [x[index, :CHECKED] for x in samples.inputs]
        outcome = CHECKS[name](model, *(x.double() if x.is_floating_point() else x for x in inputs))
        found[name] = {"difference": outcome.difference, "inputs": outcome.inputs, "holds": outcome.holds}
    return found

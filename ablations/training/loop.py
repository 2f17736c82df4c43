"""Train the seeds of one trial together and write down what happened."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from veriformer.ablations.tasks import IGNORED, TASKS, Samples, Task
from veriformer.ablations.training.exactness import CHECKS
from veriformer.ablations.training.observation import attention_entropy, gradient_norms
from veriformer.ablations.training.stacking import Stack
from veriformer.ablations.trials.recipe import Recipe
from veriformer.ablations.trials.trial import Trial

HELD_OUT, PROBED, OBSERVATIONS, CURVE_POINTS, CHECKED = 1024, 64, 12, 50, 64
"""Samples of the final test, samples and times of the tests on the way, points of a curve, inputs of a theorem."""

SPIKE, DIVERGED, WINDOW = 10.0, 10.0, 25
"""A loss ten times its running median (of the last 25 steps) and above that of guessing is a spike; one after warm-up
ten times the first is divergence."""

HELD_OUT_SEED = 2**40
"""Training data comes from the trials' own seeds, which are smaller."""


@dataclass
class _Log:
    """What is collected while a stack trains; tensors stay on the device, `[..., seeds]`."""

    losses: Tensor
    accuracies: Tensor
    at: list[int]
    probed: list[Tensor]
    norms: list[dict[str, Tensor]]
    entropies: list[list[Tensor]]


def train(trials: Sequence[Trial]) -> list[dict[str, Any]]:
    """Train the same trial for several seeds together; return one record a seed, in order.

    Raises:
        torch.OutOfMemoryError: the stack does not fit on the device; give fewer seeds.
    """
    trial, started = trials[0], time.perf_counter()
    task, recipe, device = TASKS[trial.task], trial.recipe, torch.device(trial.device)
    stack = Stack(trials)
    data = [training_data(task, recipe, t.seed) for t in trials]
    inputs = tuple(torch.stack(column, dim=0).to(device) for column in zip(*(d.inputs for d in data), strict=True))
    labels = torch.stack([d.labels for d in data]).to(device)
    probe = _shared(task.draw(HELD_OUT_SEED + 1, PROBED), len(trials), device)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(trial.seed)  # of dropout
        log = _run(stack, recipe, inputs, labels, probe)
    stack.train(False)
    records = _judge(stack, task, trials, log, recipe)
    seconds = (time.perf_counter() - started) / len(trials)
    for record in records:
        record |= {"seconds": seconds, "stack": len(trials)}
    return records


def training_data(task: Task, recipe: Recipe, seed: int) -> Samples:
    """Return all samples of a seed; the same ones for every variant."""
    total = recipe.steps * recipe.batch_size
    if not recipe.num_samples:
        return task.draw(seed, total)
    fixed = task.draw(seed, recipe.num_samples)
    order = torch.randint(recipe.num_samples, (total,), generator=torch.Generator().manual_seed(seed))
    return Samples(tuple(x[order] for x in fixed.inputs), fixed.labels[order])


def _shared(samples: Samples, seeds: int, device: torch.device) -> Samples:
    """Show the same samples to every seed of a stack."""
    spread = tuple(x.to(device).expand(seeds, *x.shape) for x in samples.inputs)
    return Samples(spread, samples.labels.to(device).expand(seeds, *samples.labels.shape))


def _run(stack: Stack, recipe: Recipe, inputs: tuple[Tensor, ...], labels: Tensor, probe: Samples) -> _Log:
    seeds, device = len(stack), labels.device
    empty = torch.empty(recipe.steps, seeds, device=device)
    log = _Log(empty, empty.clone(), [], [], [], [])
    observed = {round(i * (recipe.steps - 1) / (OBSERVATIONS - 1)) for i in range(OBSERVATIONS)}
    optimizer = torch.optim.AdamW(
        stack.parameters.values(), betas=(0.9, recipe.beta2), weight_decay=recipe.weight_decay, fused=True
    )
    size = recipe.batch_size
    for step in range(recipe.steps):
        if step in observed:
            _probe(stack, probe, log)
        stack.train()
        batch = slice(step * size, (step + 1) * size)
        target = labels[:, batch]
        with _precision(recipe, device):
            logits = stack(*(x[:, batch] for x in inputs))
        loss, accuracy = _loss_and_accuracy(logits.float(), target, recipe.label_smoothing)
        optimizer.zero_grad(set_to_none=True)
        loss.sum().backward()
        log.losses[step], log.accuracies[step] = loss.detach(), accuracy
        if step in observed:
            log.at.append(step)
            log.norms.append(gradient_norms(stack.parameters))
        if recipe.clip:
            _clip(stack, recipe.clip)
        for group in optimizer.param_groups:
            group["lr"] = recipe.rate_at(step)
        optimizer.step()
    return log


def _precision(recipe: Recipe, device: torch.device) -> contextlib.AbstractContextManager[object]:
    return torch.autocast(device.type, torch.bfloat16) if recipe.autocast else contextlib.nullcontext()


def _loss_and_accuracy(logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return each seed's cross-entropy (nats) and accuracy; logits `[seeds, B, ..., C]`, labels `[seeds, B, ...]`."""
    seeds, judged = len(labels), labels != IGNORED
    loss = functional.cross_entropy(
        logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="none", label_smoothing=smoothing
    )
    count = judged.view(seeds, -1).sum(dim=1)
    right = (logits.detach().argmax(dim=-1) == labels) & judged
    return loss.view(seeds, -1).sum(dim=1) / count, right.view(seeds, -1).sum(dim=1) / count


def _clip(stack: Stack, largest: float) -> None:
    """Scale each seed's gradient down to norm `largest`; seeds never see one another's."""
    gradients = [p.grad for p in stack.parameters.values() if p.grad is not None]
    norm = torch.stack([g.flatten(1).square().sum(dim=1) for g in gradients]).sum(dim=0).sqrt()
    factor = (largest / norm).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(factor.view(-1, *[1] * (gradient.ndim - 1)))


@torch.no_grad()
def _probe(stack: Stack, probe: Samples, log: _Log) -> None:
    stack.train(False)
    logits, weights = stack.with_weights(*probe.inputs)
    log.probed.append(_loss_and_accuracy(logits, probe.labels)[1])
    log.entropies.append([attention_entropy(w) for w in weights])


@torch.no_grad()
def _judge(stack: Stack, task: Task, trials: Sequence[Trial], log: _Log, recipe: Recipe) -> list[dict[str, Any]]:
    device = torch.device(trials[0].device)
    held_out = _shared(task.draw(HELD_OUT_SEED, HELD_OUT), len(trials), device)
    logits = _in_batches(stack, held_out)
    loss, accuracy = _loss_and_accuracy(logits, held_out.labels)
    error = _calibration_error(logits, held_out.labels)
    elsewhere = {}
    for length in trials[0].lengths:
        other = _shared(task.draw(HELD_OUT_SEED, HELD_OUT // 4, length), len(trials), device)
        elsewhere[str(length)] = _loss_and_accuracy(_in_batches(stack, other), other.labels)[1].tolist()
    _probe(stack, _shared(task.draw(HELD_OUT_SEED + 1, PROBED), len(trials), device), log)
    log.at.append(recipe.steps)
    sample = stack.with_weights(*(x[:, :1] for x in held_out.inputs))[1]
    losses, accuracies = log.losses.double().cpu(), log.accuracies.double().cpu()
    records = []
    for index, trial in enumerate(trials):
        record: dict[str, Any] = {
            "accuracy": accuracy[index].item(),
            "loss": _finite(loss[index].item()),
            "calibration_error": _finite(error[index].item()),
            **_events(losses[:, index], accuracies[:, index], recipe, task),
            "lengths": {length: values[index] for length, values in elsewhere.items()},
            "curves": _curves(log, losses[:, index], accuracies[:, index], index),
            "checks": _verify(stack, trial, index, held_out),
        }
        if index == 0:
            record["attention"] = [[_rounded(head) for head in layer[0, 0].tolist()] for layer in sample]
        records.append(record)
    return records


def _in_batches(stack: Stack, samples: Samples, size: int = 256) -> Tensor:
    total = samples.labels.shape[1]
    parts = [stack(*(x[:, i : i + size] for x in samples.inputs)) for i in range(0, total, size)]
    return torch.cat(parts, dim=1).float()


def _calibration_error(logits: Tensor, labels: Tensor, bins: int = 15) -> Tensor:
    """Return the expected calibration error `[seeds]` over bins of confidence (Guo et al. 2017, section 2)."""
    confidence, guess = logits.softmax(dim=-1).max(dim=-1)
    judged = labels != IGNORED
    errors = []
    for index in range(len(labels)):
        sure, right = confidence[index][judged[index]], (guess == labels)[index][judged[index]].float()
        place = (sure * bins).long().clamp(0, bins - 1)
        gaps = torch.zeros(bins, device=sure.device).index_add_(0, place, sure - right)
        errors.append(gaps.abs().sum() / len(sure))
    return torch.stack(errors)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _rounded(values: list[Any]) -> list[Any]:
    return [_rounded(v) if isinstance(v, list) else round(v, 4) if math.isfinite(v) else None for v in values]


def _events(losses: Tensor, accuracies: Tensor, recipe: Recipe, task: Task) -> dict[str, Any]:
    """Spikes, divergence, area under the loss, steps to 95 % of the best: of the raw loss, nothing smoothed away."""
    finite = torch.isfinite(losses)
    worst = losses[finite].max().item() if bool(finite.any()) else None
    spikes, guessing = 0, math.log(1 / task.chance)
    for step in range(WINDOW, len(losses)):
        before = losses[step - WINDOW : step]
        spikes += bool(losses[step] > max(SPIKE * before.nanmedian().item(), guessing)) or not bool(finite[step])
    after = losses[recipe.warm_up :]
    last = losses[-min(WINDOW, len(losses)) :].mean().item()
    why = None
    if not bool(finite.all()):
        why = "the loss was not finite"
    elif bool((after > DIVERGED * losses[0]).any()):
        why = "the loss rose above ten times the first"
    elif last > 2 * guessing:
        why = "the last loss is above twice that of guessing"
    smooth = accuracies.unfold(0, min(10, len(accuracies)), 1).mean(dim=1)
    wanted = task.chance + 0.95 * (task.best - task.chance)
    reached = (smooth >= wanted).nonzero()
    return {
        "loss_area": _finite(losses.mean().item()),
        "max_loss": worst,
        "spikes": int(spikes),
        "diverged": why,
        "steps_to_95": int(reached[0]) + min(10, len(accuracies)) if len(reached) else None,
    }


def _curves(log: _Log, losses: Tensor, accuracies: Tensor, index: int) -> dict[str, Any]:
    edges = [round(i * len(losses) / CURVE_POINTS) for i in range(CURVE_POINTS + 1)]
    bins = [(a, b) for a, b in itertools.pairwise(edges) if b > a]
    return {
        "step": [b for _, b in bins],
        "loss": _rounded([losses[a:b].mean().item() for a, b in bins]),
        "accuracy": _rounded([accuracies[a:b].mean().item() for a, b in bins]),
        "observed_at": log.at,
        "held_out_accuracy": _rounded([a[index].item() for a in log.probed]),
        "gradient_norm": {
            part: [_significant(step[part][index].item()) for step in log.norms]
            for part in (log.norms[0] if log.norms else ())
        },
        "entropy": [[_rounded(layer[index].tolist()) for layer in step] for step in log.entropies],
    }


def _significant(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None


def _verify(stack: Stack, trial: Trial, index: int, samples: Samples) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in trial.checks:
        model = stack.one(index).double()
        inputs = samples.inputs[0][index, :CHECKED]
        outcome = CHECKS[name](model, inputs.double() if inputs.is_floating_point() else inputs)
        found[name] = {"difference": outcome.difference, "inputs": outcome.inputs, "holds": outcome.holds}
    return found

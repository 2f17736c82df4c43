"""Train the seeds of one trial together."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from veriformer.ablations.tasks import TASKS, Samples
from veriformer.ablations.training.observation import Log, gradient_norms
from veriformer.ablations.training.records import records_of
from veriformer.ablations.training.samples import HELD_OUT_SEED, PROBED, shared, training_data
from veriformer.ablations.training.scores import loss_and_accuracy
from veriformer.ablations.training.stacking import Stack
from veriformer.ablations.trials.recipe import Recipe
from veriformer.ablations.trials.trial import Trial

OBSERVATIONS = 12
"""Times at which a stack is observed while it trains, evenly spread from the first step to the last."""

TESTED = 20
"""Times at which its loss on unseen samples is taken, in eval mode; the area under it is a trapezium between two."""


def train(trials: Sequence[Trial]) -> list[dict[str, Any]]:
    """Train the same trial for several seeds together; return one record a seed, in order.

    Besides the seed, trials of a stack may differ in learning rate, warm-up and the scheme of the initial weights.

    Raises:
        torch.OutOfMemoryError: the stack does not fit on the device; give fewer seeds.
    """
    trial, started = trials[0], time.perf_counter()
    task, recipe, device = TASKS[trial.task], trial.recipe, torch.device(trial.device)
    stack = Stack(trials)
    data = [training_data(task, recipe, t.seed) for t in trials]
    inputs = tuple(torch.stack(column, dim=0).to(device) for column in zip(*(d.inputs for d in data), strict=True))
    labels = torch.stack([d.labels for d in data]).to(device)
    probe = shared(task.draw(HELD_OUT_SEED + 1, PROBED), len(trials), device)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(trial.seed)  # of dropout
        log = _run(stack, inputs, labels, probe)
    stack.train(False)
    records = records_of(stack, log)
    seconds = (time.perf_counter() - started) / len(trials)
    for record in records:
        record |= {"seconds": seconds, "stack": len(trials)}
    return records


def _run(stack: Stack, inputs: tuple[Tensor, ...], labels: Tensor, probe: Samples) -> Log:
    seeds, device, recipe = len(stack), labels.device, stack.trials[0].recipe
    empty = torch.empty(recipe.steps, seeds, device=device)
    log = Log(empty, empty.clone())
    observed = {round(i * (recipe.steps - 1) / (OBSERVATIONS - 1)) for i in range(OBSERVATIONS)}
    tested = {round(i * recipe.steps / TESTED) for i in range(TESTED)}
    optimizer = torch.optim.AdamW(
        stack.parameters.values(), betas=(0.9, recipe.beta2), weight_decay=recipe.weight_decay, fused=True
    )
    size = recipe.batch_size
    for step in range(recipe.steps):
        if step in observed:
            log.observe(step, stack, probe)
        if step in tested:
            log.test(step, stack, probe)
        stack.train()
        batch = slice(step * size, (step + 1) * size)
        target = labels[:, batch]
        with _precision(recipe, device):
            logits = stack(*(x[:, batch] for x in inputs))
        loss, accuracy = loss_and_accuracy(logits.float(), target, recipe.label_smoothing)
        optimizer.zero_grad(set_to_none=True)
        loss.sum().backward()
        # what is written down is the cross-entropy itself: a smoothed one cannot reach zero
        plain = loss_and_accuracy(logits.detach().float(), target)[0] if recipe.label_smoothing else loss.detach()
        log.losses[step], log.accuracies[step] = plain, accuracy
        if step in observed:
            log.norms.append(gradient_norms(stack.parameters))
        if recipe.clip:
            _clip(stack, recipe.clip)
        _step(optimizer, stack, [t.recipe.rate_at(step) for t in stack.trials])
    log.observe(recipe.steps, stack, probe)
    log.test(recipe.steps, stack, probe)
    return log


def _step(optimizer: torch.optim.AdamW, stack: Stack, rates: Sequence[float]) -> None:
    """Step each model at its own learning rate.

    What AdamW adds to a parameter is its rate times something that no rate enters, its decoupled decay included; so the
    step is taken at the largest rate and each model goes its own share of the way.
    """
    largest = max(rates)
    for group in optimizer.param_groups:
        group["lr"] = largest
    if min(rates) == largest:
        optimizer.step()
        return
    before = [p.detach().clone() for p in stack.parameters.values()]
    optimizer.step()
    share = torch.tensor(rates, device=before[0].device) / largest
    with torch.no_grad():
        for old, parameter in zip(before, stack.parameters.values(), strict=True):
            parameter.copy_(torch.lerp(old, parameter, share.view(-1, *[1] * (old.ndim - 1))))


def _precision(recipe: Recipe, device: torch.device) -> contextlib.AbstractContextManager[object]:
    return torch.autocast(device.type, torch.bfloat16) if recipe.autocast else contextlib.nullcontext()


def _clip(stack: Stack, largest: float) -> None:
    """Scale each seed's gradient down to norm `largest`; seeds never see one another's."""
    gradients = [p.grad for p in stack.parameters.values() if p.grad is not None]
    norm = torch.stack([g.flatten(1).square().sum(dim=1) for g in gradients]).sum(dim=0).sqrt()
    factor = (largest / norm).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(factor.view(-1, *[1] * (gradient.ndim - 1)))

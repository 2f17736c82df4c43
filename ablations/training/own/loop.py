"""Train the seeds of a trial of somebody's own study."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from veriformer.ablations.training.observation import Log, norms_by_part
from veriformer.ablations.training.own.blame import OwnCodeError, doing
from veriformer.ablations.training.own.building import built
from veriformer.ablations.training.own.feeding import held_out_batches, training_batches
from veriformer.ablations.training.own.learners import Alone, Learners, Together
from veriformer.ablations.training.own.losses import first_of
from veriformer.ablations.training.own.records import Observed, observe, record_of
from veriformer.ablations.training.samples import PROBED
from veriformer.ablations.trials.own import Parts, at_home, parts_of
from veriformer.ablations.trials.recipe import Recipe
from veriformer.ablations.trials.trial import Trial

OBSERVATIONS = 12
"""Times at which a model is observed while it trains, evenly spread from the first step to the last."""


def train_own(trials: Sequence[Trial]) -> list[Any]:
    """Train an own trial for several seeds; return one record a seed, in order.

    Seeds that turn out not to stack are trained one by one, and their records say why; one whose code raises is no
    harm to the others, and has the OwnCodeError in the place of its record.

    Raises:
        OwnCodeError: the user's code raised, or gave what cannot be used, for the only seed.
        torch.OutOfMemoryError: the stack does not fit on the device; give fewer seeds.
    """
    with at_home(trials[0]):
        if len(trials) > 1 and trials[0].stacked:
            try:
                return _train(trials)
            except (MemoryError, torch.OutOfMemoryError):
                raise
            except Exception as problem:  # the user's own fault shows itself again below, with plain frames
                why = str(problem).splitlines()[0] if str(problem) else type(problem).__name__
            return _one_by_one(trials, why)
        return [record for trial in trials for record in _train([trial])]


def _one_by_one(trials: Sequence[Trial], why: str) -> list[Any]:
    found: list[Any] = []
    for trial in trials:
        try:
            found += [record | {"apart": why} for record in _train([replace(trial, stacked=False)])]
        except OwnCodeError as problem:
            found.append(problem)
    return found


def _train(trials: Sequence[Trial]) -> list[dict[str, Any]]:
    trial, started, device = trials[0], time.perf_counter(), torch.device(trials[0].device)
    with doing("reading the study", trial):
        parts = parts_of(trial)
    models = [built(parts, t, device) for t in trials]
    smoothing = trial.recipe.label_smoothing
    learners: Learners = (
        Together(models, parts.task, smoothing) if len(models) > 1 else Alone(models[0], parts.task, smoothing)
    )
    cuda = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):
        torch.manual_seed(trial.seed)  # of dropout
        log, observed = _run(learners, parts, trials, device)
    records = [
        record_of(learners.one(i), t, parts, index=i, log=log, seen=observed[i], device=device)
        for i, t in enumerate(trials)
    ]
    seconds = (time.perf_counter() - started) / len(trials)
    return [record | {"seconds": seconds, "stack": len(trials)} for record in records]


def _run(learners: Learners, parts: Parts, trials: Sequence[Trial], device: torch.device) -> tuple[Log, list[Observed]]:
    trial, seeds, recipe = trials[0], len(trials), trials[0].recipe
    empty = torch.full((recipe.steps, seeds), float("nan"), device=device)
    log, observed = Log(empty, empty.clone()), [Observed() for _ in trials]
    steps = {round(i * (recipe.steps - 1) / (OBSERVATIONS - 1)) for i in range(OBSERVATIONS)}
    optimizer = _optimizer(learners, parts, trial)
    rates = [group["lr"] for group in optimizer.param_groups]
    sources = [training_batches(parts.task, t, device) for t in trials]
    with doing("getting a held-out batch", trial):
        probe = next(held_out_batches(parts.task, device), None)
        if probe is None:
            raise ValueError("there is no held-out batch")
        probe = first_of(probe, PROBED)

    def look(step: int) -> None:
        log.at.append(step)
        for index, t in enumerate(trials):
            with doing("testing the model", t):
                observe(observed[index], learners.one(index), probe, parts.task)

    for step in range(recipe.steps):
        if step in steps:
            look(step)
        now = []
        for t, source in zip(trials, sources, strict=True):
            with doing(f"getting batch {step}", t):
                try:
                    now.append(next(source))
                except StopIteration:
                    raise ValueError(f"the data of task {t.task!r} ended after {step} batches") from None
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * recipe.rate_at(step) / recipe.learning_rate
        with doing(f"training step {step}", trial), _precision(recipe, device):
            loss, accuracy, norms = _step(learners, parts, optimizer, now, recipe, watched=step in steps)
        log.losses[step], log.accuracies[step] = loss, accuracy
        if step in steps:
            log.norms.append(norms)
    look(recipe.steps)
    log.probed = [torch.tensor(column) for column in zip(*(o.metrics for o in observed), strict=True)]
    # a part whose gradient appears later, or never, has no curve
    parts_of_all = set.intersection(*(set(norms) for norms in log.norms)) if log.norms else set()
    log.norms = [{k: v for k, v in norms.items() if k in parts_of_all} for norms in log.norms]
    return log, observed


def _optimizer(learners: Learners, parts: Parts, trial: Trial) -> Any:
    recipe = trial.recipe
    if parts.optimizer is not None:
        with doing("making the optimizer", trial):
            assert isinstance(learners, Alone)  # it is never stacked: an optimizer may mix what it is given
            optimizer = parts.optimizer(learners.model)
            if not all(hasattr(optimizer, name) for name in ("param_groups", "step", "zero_grad")):
                raise TypeError(f"optimizer returned {type(optimizer).__name__}; a torch.optim.Optimizer is required")
            return optimizer
    trainable = learners.trainable()
    if not trainable:  # the step is the user's own, and so is what it changes
        trainable = [torch.zeros(1, requires_grad=True)]
    return torch.optim.AdamW(
        trainable, lr=recipe.learning_rate, betas=(0.9, recipe.beta2), weight_decay=recipe.weight_decay, fused=True
    )


def _step(
    learners: Learners, parts: Parts, optimizer: Any, batches: Sequence[Any], recipe: Recipe, *, watched: bool
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Take one step; return loss and accuracy of each seed and, where it is watched, the gradient's norms by part."""
    learners.train(True)
    if parts.step is not None:
        assert isinstance(learners, Alone)
        loss = torch.as_tensor(parts.step(learners.model, optimizer, batches[0])).detach()
        if loss.numel() != 1:
            raise TypeError(f"step returned a tensor of shape {tuple(loss.shape)}; the loss, one number, is required")
        unknown = torch.full((1,), float("nan"))
        return loss.reshape(1), unknown, norms_by_part(learners.gradients()) if watched else {}
    loss, accuracy = learners.losses(batches)
    optimizer.zero_grad(set_to_none=True)
    loss.sum().backward()
    norms = norms_by_part(learners.gradients()) if watched else {}
    if recipe.clip:
        _clip(learners, recipe.clip)
    optimizer.step()
    return loss.detach(), accuracy.detach(), norms


def _clip(learners: Learners, largest: float) -> None:
    """Scale each seed's gradient down to norm `largest`."""
    gradients = list(learners.gradients().values())
    norm = torch.stack([g.flatten(1).square().sum(dim=1) for g in gradients]).sum(dim=0).sqrt()
    factor = (largest / norm).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(factor.view(-1, *[1] * (gradient.ndim - 1)))


def _precision(recipe: Recipe, device: torch.device) -> contextlib.AbstractContextManager[object]:
    return torch.autocast(device.type, torch.bfloat16) if recipe.autocast else contextlib.nullcontext()

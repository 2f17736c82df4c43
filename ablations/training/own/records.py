"""What is written down of one seed of an own study: how it did, what went wrong, curves, attention."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from veriformer.ablations.tasks import Task
from veriformer.ablations.training.exactness import CHECKS
from veriformer.ablations.training.observation import Log, attention_entropy
from veriformer.ablations.training.own.blame import doing
from veriformer.ablations.training.own.building import built
from veriformer.ablations.training.own.feeding import held_out_batches
from veriformer.ablations.training.own.losses import first_of, logits_in, parted, samples_in, tested_on
from veriformer.ablations.training.own.watching import attentions
from veriformer.ablations.training.records import CHECKED, curves_of, events, finite_or_none, rounded
from veriformer.ablations.training.scores import calibration_error
from veriformer.ablations.trials.own import Parts
from veriformer.ablations.trials.trial import Trial

SMALLEST_PICTURE, LARGEST_PICTURE = 2, 64
"""Tokens of an attention map that is kept; a larger one would weigh more than the rest of the report."""


@dataclass
class Observed:
    """What is seen of one seed while it trains.

    Attributes:
        metrics: on the first held-out batch, by observation.
        entropies: of attention by layer, `[H]`, by observation; empty where none could be seen.
        blind: why something could not be measured, in words.
    """

    metrics: list[float] = field(default_factory=list)
    entropies: list[list[Tensor]] = field(default_factory=list)
    blind: dict[str, None] = field(default_factory=dict)


def observe(observed: Observed, model: nn.Module, batch: Any, task: Task) -> None:
    """Write down what a model makes of a held-out batch; an instrument that fails is left out and says so."""
    try:
        with torch.no_grad(), _untouched(), attentions(int(samples_in(batch))) as weights:
            metric = tested_on(model, batch, task)[1]
        entropies = [attention_entropy(w[None])[0].cpu() for w in weights]
        if not weights:
            observed.blind["attention entropy: no attention of [B, H, T, S] is computed"] = None
    except Exception as problem:  # of the instrument, or of the user's own: then it is raised again, with plain frames
        with torch.no_grad(), _untouched():
            metric = tested_on(model, batch, task)[1]
        observed.blind[f"attention entropy: {type(problem).__name__} while it was measured"] = None
        entropies = []
    observed.metrics.append(metric)
    observed.entropies.append(entropies)


@contextmanager
def _untouched() -> Iterator[None]:
    """Leave the random numbers of the training as they are, whatever a test draws."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


@torch.no_grad()
def record_of(
    model: nn.Module,
    trial: Trial,
    parts: Parts,
    *,
    index: int,
    log: Log,
    seen: Observed,
    device: torch.device,
) -> dict[str, Any]:
    """Return the record of one trained seed, whose place in its job is `index`.

    Raises:
        OwnCodeError: the metric is not finite though the loss is.
    """
    task = parts.task
    losses, accuracies = log.losses[:, index].double().cpu(), log.accuracies[:, index].double().cpu()
    happened = events(losses, accuracies, trial.recipe, task)
    with doing("testing the trained model", trial):
        loss, metric, error = _tested(model, task, device)
        if not math.isfinite(metric):
            metric = _untrained(metric, happened, trial, parts, device)
    elsewhere = {}
    for length in trial.lengths if task.sample is not None else ():
        with doing(f"testing at length {length}", trial):
            elsewhere[str(length)] = _tested(model, task, device, length)[1]
    shapes = {tuple(len(heads) for heads in step) for step in seen.entropies}
    if len(shapes) > 1:
        seen.blind["attention entropy: the model computes more attentions at some times than at others"] = None
    has_layers = len(shapes) == 1 and bool(min(shapes))
    record: dict[str, Any] = {
        "accuracy": metric,
        "loss": finite_or_none(loss),
        "calibration_error": finite_or_none(error),
        "loss_area": finite_or_none(losses.mean().item()),
        **happened,
        "lengths": elsewhere,
        "curves": {
            **curves_of(log, losses, accuracies, index),
            "entropy": [[rounded(layer.tolist()) for layer in step] for step in seen.entropies] if has_layers else [],
        },
        "checks": _verify(model, trial, task, device),
        "blind": list(seen.blind),
    }
    if index == 0 and has_layers:
        record["attention"] = _pictures(model, task, device)
    return record


def _tested(
    model: nn.Module, task: Task, device: torch.device, length: int | None = None
) -> tuple[float, float, float]:
    """Return loss, metric and calibration error over all held-out batches, each weighted by what it judges."""
    total = losses = metrics = 0.0
    judged: list[tuple[Tensor, Tensor]] = []
    for batch in held_out_batches(task, device, length):
        with _untouched():
            loss, metric, weight, classified = tested_on(model, batch, task)
        if not weight:  # a batch in which no label is judged says nothing
            continue
        total, losses, metrics = total + weight, losses + weight * loss, metrics + weight * metric
        if classified is not None:
            judged.append(classified)
    if not total:
        raise ValueError(f"task {task.name!r} has nothing to test on: no held-out batch, or none with a sample")
    error = math.nan
    if judged:
        logits, labels = (torch.cat(column)[None] for column in zip(*judged, strict=True))
        error = calibration_error(logits, labels).item()
    return losses / total, metrics / total, error


def _untrained(metric: float, happened: dict[str, Any], trial: Trial, parts: Parts, device: torch.device) -> float:
    """Return the metric before training, as which a model counts that diverged: it is not left out.

    Raises:
        ValueError: it did not diverge, or the metric was no better before.
    """
    before = math.nan
    if happened["diverged"] is not None:
        before = _tested(built(parts, trial, device).eval(), parts.task, device)[1]
    if math.isfinite(before):
        return before
    raise ValueError(
        f"the metric was {metric}{' before and after training' if happened['diverged'] else ''}; a finite number is "
        "required"
    )


def _pictures(model: nn.Module, task: Task, device: torch.device) -> list[Any]:
    """Return the attention maps of the first held-out sample by layer and head; none where they cannot be had."""
    batch = first_of(next(held_out_batches(task, device)), 1)
    try:
        with _untouched(), attentions(int(samples_in(batch))) as seen:
            tested_on(model, batch, task)
    except Exception:  # why is told by the observations, which look at the same
        return []
    weights = [w[0] for w in seen if bool(torch.isfinite(w).all())]
    small = [w for w in weights if SMALLEST_PICTURE <= w.shape[-1] <= LARGEST_PICTURE and w.shape[-2] > 1]
    return [[rounded(head) for head in layer.tolist()] for layer in small]


def _verify(model: nn.Module, trial: Trial, task: Task, device: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in trial.checks:
        with doing(f"checking the theorem {name!r}", trial):
            inputs = parted(next(held_out_batches(task, device)))[0][0][:CHECKED]
            exact = model.double()
            outcome = CHECKS[name](_Logits(exact), inputs.double() if inputs.is_floating_point() else inputs)
            found[name] = {"difference": outcome.difference, "inputs": outcome.inputs, "holds": outcome.holds}
            model.float()
    return found


class _Logits(nn.Module):
    """A model of which only the logits are returned."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Tensor) -> Tensor:
        return logits_in(self.model(*inputs))

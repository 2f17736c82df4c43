"""Whether the seeds of an own trial can be trained as one model, tried out; where not, why."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from veriformer.ablations.training.own.blame import OwnCodeError, doing
from veriformer.ablations.training.own.building import built
from veriformer.ablations.training.own.feeding import first_batches
from veriformer.ablations.training.own.learners import Alone, Together, UnlikeError
from veriformer.ablations.trials.own import Parts, at_home, parts_of
from veriformer.ablations.trials.trial import Trial

LARGE = 1_000_000
"""Parameters beyond which a model keeps a core busy by itself, so that a stack of them gains nothing."""

SAME = 1e-3
"""Largest difference of a loss or a gradient, relative to its size, between stacked and alone: float32 of a small model
rounds to 1e-6, and a layer that mixes seeds, or draws what it should not, differs by far more."""


_SLOW = re.compile(r"batching rule for (\S+?)\.? ")


def why_apart(trial: Trial) -> str:
    """Return why the seeds of a trial are trained one by one, or "" where stacked ones give the same.

    Two seeds take one step, stacked and alone. What the user's code raises is told by training.
    """
    with at_home(trial), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they are heard again where it is trained
        try:
            parts = parts_of(trial)
            if parts.step is not None:
                return "it has a training step of its own"
            if parts.optimizer is not None:
                return "it has an optimizer of its own, which may mix what it is given"
            pair = [trial, replace(trial, seed=trial.seed + 1)]
            cpu = torch.device("cpu")
            model = built(parts, trial, cpu)
            if sum(p.numel() for p in model.parameters()) > LARGE:
                return f"its model has more than {LARGE:,} parameters, and fills a core alone"
            return _tried(parts, pair, [model, built(parts, pair[1], cpu)], cpu)
        except OwnCodeError:
            return "its code raised"
        except Exception as problem:
            return f"it cannot be stacked ({_first_line(problem)})"


def _tried(parts: Parts, pair: Sequence[Trial], models: Sequence[nn.Module], device: torch.device) -> str:
    batches = first_batches(parts, pair, device)
    smoothing = pair[0].recipe.label_smoothing
    try:
        together = Together(models, parts.task, smoothing)
    except Exception as problem:
        return f"its models do not stack ({_first_line(problem)})"
    before = [{n: b.clone() for n, b in model.named_buffers()} for model in models]
    alone = [Alone(model, parts.task, smoothing) for model in models]
    with torch.random.fork_rng(devices=[]), doing("training", pair[0]):
        for learner, batch in zip(alone, batches, strict=True):
            learner.train(True)
            learner.losses([batch])
    try:
        with torch.random.fork_rng(devices=[]):
            if any(
                not torch.equal(b, old[n]) for m, old in zip(models, before, strict=True) for n, b in m.named_buffers()
            ):
                return "its buffers change while it trains (BatchNorm, running averages)"
            together.train(True)
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                together.losses(batches)[0].sum().backward()
            if slow := next((_SLOW.search(str(w.message)) for w in told if _SLOW.search(str(w.message))), None):
                return f"vmap has no rule for {slow[1]}, and would go through the seeds in a loop"
        for parameter in together.trainable():
            parameter.grad = None
        together.train(False)  # without dropout both are functions of the weights
        losses = together.losses(batches)[0]
        losses.sum().backward()
    except UnlikeError as problem:
        return str(problem)
    except Exception as problem:
        return f"vmap cannot train it ({_first_line(problem)})"
    stacked = together.gradients()
    for index, learner in enumerate(alone):
        learner.train(False)
        loss = learner.losses([batches[index]])[0]
        loss.sum().backward()
        if not _alike(loss[0].detach(), losses[index].detach(), 0.0):
            return f"stacked and alone its losses differ ({losses[index].item():.4g} and {loss.item():.4g})"
        gradients = learner.gradients()
        least = 1e-3 * max(float(g.abs().max()) for g in gradients.values() if g.numel())
        for name, gradient in gradients.items():
            if name not in stacked or not _alike(gradient[0], stacked[name][index], least):
                return f"stacked and alone the gradients of {name} differ"
    return ""


def _alike(a: Tensor, b: Tensor, least: float) -> bool:
    """Whether two tensors are alike for their size, or for the `least` that counts as one."""
    if not a.numel():
        return True
    return float((a - b).abs().max()) <= SAME * max(float(a.abs().max()), least)


def _first_line(problem: BaseException) -> str:
    """Return the first sentence of what was raised."""
    text = str(problem).strip()
    return f"{type(problem).__name__}: {text.splitlines()[0].partition('. ')[0]}" if text else type(problem).__name__

"""What else a variant of an own study has otherwise than the base: its size, what trains it, what nothing trains."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import torch
from torch import nn

from veriformer.ablations.training.own.building import built
from veriformer.ablations.trials.own import Parts
from veriformer.ablations.trials.trial import Trial

_TIMES = 2.0
"""How many times as many parameters are told: parts that are taken out take fewer with them."""

_TOLD = ("lr", "momentum", "betas", "weight_decay", "nesterov")
_CPU = torch.device("cpu")


def differences(parts: Parts, trial: Trial, base_parts: Parts, base: Trial, *, is_other_model: bool) -> list[str]:
    """Return, in sentences, in what else than its change a variant differs from the base.

    Args:
        parts: of the variant.
        trial: of the variant.
        base_parts: of the base.
        base: the trial of the base.
        is_other_model: whether the variant changes the model: what trains it is no part of that change then.

    Raises:
        OwnCodeError: the user's code raised.
    """
    models = model, usual = built(parts, trial, _CPU), built(base_parts, base, _CPU)
    found, start = list(_of_the_sizes(model, usual)), list(_of_the_starts(model, usual, trial))
    if is_other_model:
        found += _of_the_recipes(trial, base)
        if parts.optimizer is not base_parts.optimizer:
            made = [_optimizer(p, m, t) for p, m, t in zip((parts, base_parts), models, (trial, base), strict=True)]
            if made[0] != made[1]:
                found.append(
                    f"its optimizer differs from the base's, besides its other change: {made[0]} against {made[1]}; "
                    "what is compared is both"
                )
    return found + start


def untrained(parts: Parts, trial: Trial) -> list[str]:
    """Return, in a sentence, the parameters that want a gradient and are given to no group of the optimizer."""
    if parts.optimizer is None or parts.step is not None:
        return []
    model = built(parts, trial, _CPU)
    given = {id(p) for group in parts.optimizer(model).param_groups for p in group["params"]}
    left = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in given]
    if not left:
        return []
    more = f" and {len(left) - 1} more" if len(left) > 1 else ""
    return [f"{left[0]}{more}: never trained, since the optimizer is not given it; freeze it, or add it to a group"]


def _of_the_sizes(model: nn.Module, base: nn.Module) -> Iterator[str]:
    one, other = (sum(p.numel() for p in m.parameters()) for m in (model, base))
    if not one or not other:
        return
    ratio = max(one / other, other / one)
    if ratio >= _TIMES:
        word = "more" if one > other else "fewer"
        yield (
            f"it has {ratio:.3g} times {word} parameters than the base, {one:,} against {other:,}: what is compared is "
            "their size, too"
        )


def _of_the_starts(model: nn.Module, base: nn.Module, trial: Trial) -> Iterator[str]:
    """Tell the share of parameters that start with the values that the base's have, where it is not all.

    Both are built from the same seed, but a part more or less draws random numbers, and all that is built after it
    draws others.
    """
    one, other = dict(model.named_parameters()), dict(base.named_parameters())
    same = [p.numel() for n, p in one.items() if n in other and torch.equal(p, other[n])]
    share = sum(same) / max(1, sum(p.numel() for p in one.values()))
    where = f" ({trial.own.setting})" if trial.own is not None and trial.own.setting else ""
    if share < 1:
        told = f"{share:.0%} of the parameters start as the base's of the same seed do{where}"
        yield f"{told}; the data is the same for all"


def _of_the_recipes(trial: Trial, base: Trial) -> Iterator[str]:
    pairs = [(f.name, getattr(trial.recipe, f.name), getattr(base.recipe, f.name)) for f in fields(trial.recipe)]
    other = [f"{name.replace('_', ' ')} {one} against {two}" for name, one, two in pairs if one != two]
    if other:
        yield (
            f"its recipe differs from the base's, besides its other change: {', '.join(other)}; what is compared is "
            "both"
        )


def _optimizer(parts: Parts, model: nn.Module, trial: Trial) -> str:
    if parts.optimizer is None:
        return f"AdamW (lr {trial.recipe.learning_rate:g}, weight decay {trial.recipe.weight_decay:g})"
    made: Any = parts.optimizer(model)
    defaults = getattr(made, "defaults", {})
    told = [f"{name.replace('_', ' ')} {defaults[name]}" for name in _TOLD if defaults.get(name)]
    return f"{type(made).__name__} ({', '.join(told)})"

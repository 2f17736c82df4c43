"""What a model is trained on: samples from a generator, with chance, the best that is possible, and what it needs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

IGNORED = -100
"""The label of a place that is not judged, as in `torch.nn.functional.cross_entropy`."""

ACCURACY_MARGIN = 0.01
"""Difference of accuracy, one point, inside which two variants count as equivalent."""

SORTED_BLIND = 0.4620170593261719
"""Accuracy of guessing six sorted symbols of eight one after the other without the prompt; a test enumerates them."""


@dataclass(frozen=True)
class Samples:
    """Inputs and labels, samples on the first axis.

    Attributes:
        inputs: what the model is called with: tokens `[B, T]`, or source `[B, S]` and target `[B, T]`, or images.
        labels: int64 `[B]` for a class, `[B, T]` for tokens; `IGNORED` is not judged.
    """

    inputs: tuple[Tensor, ...]
    labels: Tensor

    def slice(self, start: int, stop: int) -> Samples:
        """Return the samples from `start` up to `stop`."""
        return Samples(tuple(x[start:stop] for x in self.inputs), self.labels[start:stop])


Sampler = Callable[[torch.Generator, int, int], Samples]
"""From a generator, a number of samples and a length to samples."""


Measure = Callable[[nn.Module, Any], Any]
"""From a model and a batch to a number."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """One thing to learn: data, and how well it is learned.

    A task of one's own has a name and `data`, of which a fifth is held out unless `held_out` is given; the rest is for
    what is no classification. Without a loss of its own, a batch is `(*inputs, labels)`, the model returns logits
    `[..., classes]` for int64 labels `[...]` (-100: not judged), the loss is the cross-entropy and the metric the
    accuracy.

    Attributes:
        name: of the task, as the command line knows it.
        statement: what is asked, in one sentence.
        architecture: of the reference model that fits it.
        vocab_size: tokens, special ones included.
        length: tokens in a sample of the usual length.
        chance: metric of the best answer that ignores what the task is about; nan: not known, and no seed is dead.
        best: metric that cannot be passed, at the usual length; nan: not known. 1 where the metric is the accuracy.
        num_classes: of a classification; 0 where tokens are the answer.
        needs: parts of a model that the task needs in theory.
        sample: makes samples.
        loss_floor: cross-entropy that cannot be passed, nats.
        symbols: what the first tokens are called, where a number would not say it.
        model: maker of the model in `veriformer.ablations.trials.models`, where it is not the reference.
        data: a function `(seed, step)` that returns a batch, a function `(seed)` that returns an iterable of batches, a
            DataLoader, a Dataset, a list of batches, or a tuple of tensors of which batches are drawn.
        is_parted: whether a fifth of `data` was kept from training, because there was no `held_out`.
        held_out: what is never trained on: a DataLoader, a Dataset, a list of batches or a tuple of tensors. Without
            it, `data` is asked for batches of a seed that no trial has, where it is a function.
        loss: `(model, batch)` to a scalar.
        metric: `(model, batch)` to a number, averaged over the held-out batches; without it the accuracy, or the
            held-out loss where the loss is of one's own.
        metric_name: what reports call it.
        lower_is_better: whether less of the metric is better.
        margin: difference of the metric within which two variants are equivalent: 0.01 where it is the accuracy; else
            not known (nan) unless given, and nothing is called equivalent.

    Raises:
        ValueError: there is no data, nothing to test on, or a chance outside 0 to 1 of an accuracy.
    """

    name: str
    statement: str = ""
    architecture: str = ""
    vocab_size: int = 0
    length: int = 0
    chance: float = math.nan
    sample: Sampler | None = None
    best: float = math.nan
    num_classes: int = 0
    needs: tuple[str, ...] = ()
    loss_floor: float = 0.0
    symbols: tuple[str, ...] = ()
    model: str = "reference"
    data: Any = None
    held_out: Any = None
    is_parted: bool = field(default=False, init=False)
    loss: Measure | None = None
    metric: Measure | None = None
    metric_name: str = ""
    lower_is_better: bool | None = None
    margin: float = math.nan

    def __post_init__(self) -> None:
        if self.sample is None and self.data is None:
            raise ValueError(f"task {self.name!r} has neither data nor sample; one of them is required")
        for what, value in (("data", self.data), ("held_out", self.held_out)):
            if value is not None and hasattr(value, "__next__"):
                raise ValueError(
                    f"{what} of task {self.name!r} is an iterator, which can be gone through once; give a function of "
                    "the seed that makes it"
                )
        if self.data is not None and self.held_out is None and not is_function(self.data):
            self._hold_out()
        is_accuracy = self.loss is None and self.metric is None
        lower = self.loss is not None and self.metric is None
        usual: dict[str, Any] = {
            "metric_name": "accuracy" if is_accuracy else "held-out loss" if lower else _name_of(self.metric),
            "lower_is_better": lower,
        }
        if is_accuracy:
            usual |= {"best": 1.0, "margin": ACCURACY_MARGIN}
        for name, value in usual.items():
            given = getattr(self, name)
            if given in ("", None) or given != given:
                object.__setattr__(self, name, value)
        if is_accuracy and not (self.chance != self.chance or 0 < self.chance <= 1):
            raise ValueError(f"chance of task {self.name!r} was {self.chance}; of an accuracy it lies in (0, 1]")

    def _hold_out(self) -> None:
        """Keep a fifth of the data from training."""
        from veriformer.ablations.tasks.parting import parted

        if (sides := parted(self.data)) is None:
            raise ValueError(
                f"task {self.name!r} has no held_out, and its data cannot be parted; give it batches that are never "
                "trained on"
            )
        for name, value in (("data", sides[0]), ("held_out", sides[1]), ("is_parted", True)):
            object.__setattr__(self, name, value)

    @property
    def is_accuracy(self) -> bool:
        """Whether the metric is the share of right answers."""
        return self.loss is None and self.metric is None

    def draw(self, seed: int, number: int, length: int | None = None) -> Samples:
        """Return `number` samples that are a function of `seed` alone."""
        if self.sample is None:
            raise TypeError(f"task {self.name!r} has data of its own and draws no samples")
        return self.sample(torch.Generator().manual_seed(seed), number, self.length if length is None else length)


def is_function(data: Any) -> bool:
    """Whether data is made by a call, rather than there: a DataLoader, a Dataset, a list and tensors are there."""
    return callable(data) and not hasattr(data, "__iter__") and not hasattr(data, "__getitem__")


def _name_of(metric: Any) -> str:
    name = str(getattr(metric, "__name__", "metric"))
    return "metric" if name == "<lambda>" else name.replace("_", " ")


TASKS: dict[str, Task] = {}
"""Every task by its name; a module of `veriformer.ablations.tasks` adds its own."""


def register(*tasks: Task) -> None:
    """Make tasks known by their names."""
    for task in tasks:
        if task.name in TASKS:
            raise ValueError(f"task {task.name!r} is there already; give the new one another name")
        TASKS[task.name] = task

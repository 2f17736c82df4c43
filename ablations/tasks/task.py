"""What a model is trained on: samples from a generator, with chance, the best that is possible, and what it needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

IGNORED = -100
"""The label of a place that is not judged, as in `torch.nn.functional.cross_entropy`."""

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


@dataclass(frozen=True, kw_only=True)
class Task:
    """One thing to learn.

    Attributes:
        name: of the task, as the command line knows it.
        statement: what is asked, in one sentence.
        architecture: of the reference model that fits it.
        vocab_size: tokens, special ones included.
        length: tokens in a sample of the usual length.
        chance: accuracy of the best answer that ignores what the task is about.
        best: accuracy that cannot be passed, at the usual length.
        num_classes: of a classification; 0 where tokens are the answer.
        needs: parts of a model that the task needs in theory.
        sample: makes samples.
        loss_floor: cross-entropy that cannot be passed, nats.
        model: maker of the model in `veriformer.ablations.trials.models`, where it is not the reference.
    """

    name: str
    statement: str
    architecture: str
    vocab_size: int
    length: int
    chance: float
    sample: Sampler
    best: float = 1.0
    num_classes: int = 0
    needs: tuple[str, ...] = ()
    loss_floor: float = 0.0
    model: str = "reference"

    def draw(self, seed: int, number: int, length: int | None = None) -> Samples:
        """Return `number` samples that are a function of `seed` alone."""
        return self.sample(torch.Generator().manual_seed(seed), number, self.length if length is None else length)


TASKS: dict[str, Task] = {}
"""Every task by its name; a module of `veriformer.ablations.tasks` adds its own."""


def register(*tasks: Task) -> None:
    """Make tasks known by their names."""
    for task in tasks:
        if task.name in TASKS:
            raise ValueError(f"task {task.name!r} is there already; give the new one another name")
        TASKS[task.name] = task

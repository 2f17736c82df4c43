"""Tasks that small models do not all solve: margins of one, neighbours to be found, wrong labels."""

from __future__ import annotations

import math

import torch

from veriformer.ablations.tasks.order import ORDER, VOCABULARY, precede
from veriformer.ablations.tasks.task import Samples, Task, register

CLASSES = 4
MARKER = VOCABULARY - 1

WRONG = 0.1
"""Share of labels that are wrong in *noisy-precede*, in training and in the test: what can be known ends there."""

NOISE_ENTROPY = -(WRONG * math.log(WRONG) + (1 - WRONG) * math.log(1 - WRONG))
"""Entropy of such a label, nats: the loss that no model can pass."""


def _mode(generator: torch.Generator, number: int, length: int) -> Samples:
    """Draw four tokens, one of them once more than the others: `length` is one more than a multiple of four."""
    label = torch.randint(CLASSES, (number,), generator=generator)
    order = torch.rand(number, length, generator=generator).argsort(dim=1)
    # of the places in random order, the last is the label's
    return Samples((torch.where(order == length - 1, label[:, None], order % CLASSES),), label)


def _after(generator: torch.Generator, number: int, length: int) -> Samples:
    """Put the class behind a marker; tokens that look like classes stand everywhere else too."""
    label = torch.randint(CLASSES, (number,), generator=generator)
    place = torch.randint(length - 1, (number, 1), generator=generator)
    tokens = torch.randint(MARKER, (number, length), generator=generator)
    return Samples((tokens.scatter_(1, place, MARKER).scatter_(1, place + 1, label[:, None]),), label)


def _noisy_precede(generator: torch.Generator, number: int, length: int) -> Samples:
    clean = precede(generator, number, length)
    wrong = (torch.rand(len(clean.labels), generator=generator) < WRONG).long()
    return Samples(clean.inputs, (clean.labels + wrong) % 2)


register(
    Task(
        name="mode",
        statement="which of four tokens occurs once more than each of the others?",
        architecture="classifier",
        vocab_size=VOCABULARY,
        length=25,
        chance=1 / CLASSES,
        num_classes=CLASSES,
        sample=_mode,
    ),
    Task(
        name="after",
        statement="which of four tokens follows the marker?",
        architecture="classifier",
        vocab_size=VOCABULARY,
        length=24,
        chance=1 / CLASSES,
        num_classes=CLASSES,
        needs=ORDER,
        sample=_after,
    ),
    Task(
        name="noisy-precede",
        statement="does the one a stand before the one b, when one label in ten is wrong?",
        architecture="classifier",
        vocab_size=VOCABULARY,
        length=16,
        chance=0.5,
        num_classes=2,
        needs=ORDER,
        best=1 - WRONG,
        loss_floor=NOISE_ENTROPY,
        sample=_noisy_precede,
    ),
)

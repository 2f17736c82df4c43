"""One token of a synthetic text is hidden, at its end or between others; for readers of the left or of both sides.

The source is that of `source`: two Markov chains take turns, so that the tokens two places before and behind tell all
that can be known. What the best reader of the left alone can reach is known too, and is less where
something stands behind.
"""

from __future__ import annotations

import torch
from torch import Tensor

from veriformer.ablations.tasks.language import source_sequence, source_transition
from veriformer.ablations.tasks.task import IGNORED, Sampler, Samples, Task, register

STATES, LENGTH = 16, 16
MASK = STATES
"""The token that stands for a hidden one."""

PLACES = {"continue": LENGTH - 1, "infill": LENGTH // 2}
"""Which token is hidden, by the task's name."""


def hide(sequence: Tensor, hidden: Tensor) -> Samples:
    """Return the samples that ask for the `hidden` places, bool `[B, T]`, of tokens `[B, T]`, and show the others."""
    return Samples((torch.where(hidden, MASK, sequence),), torch.where(hidden, sequence, IGNORED))


def _hiding(place: int) -> Sampler:
    def sample(generator: torch.Generator, number: int, length: int) -> Samples:
        sequence = source_sequence(generator, number, length)
        return hide(sequence, (torch.arange(length) == place).expand(number, -1))

    return sample


def best_of(place: int, *, both_sides: bool) -> float:
    """Return the accuracy of the best guess of the token at `place`, from what stands before it, or around it.

    p(x | a before, b behind) goes with P[a, x] P[x, b]; the chains begin evenly, and every second token is of the
    other one.
    """
    matrix = source_transition(STATES)
    begin = torch.full((STATES,), 1 / STATES, dtype=torch.float64)
    before = begin @ torch.linalg.matrix_power(matrix, place // 2 - 1)
    if not both_sides:
        return float((before * matrix.max(dim=1).values).sum())
    joint = before[:, None, None] * matrix[:, :, None] * matrix[None, :, :]
    return float(joint.max(dim=1).values.sum())


def best_blind(place: int) -> float:
    """Return the accuracy of always guessing the token that is the most frequent at `place`."""
    begin = torch.full((STATES,), 1 / STATES, dtype=torch.float64)
    return float((begin @ torch.linalg.matrix_power(source_transition(STATES), place // 2)).max())


def least_loss(place: int, *, both_sides: bool) -> float:
    """Return the cross-entropy that no reader of the left, or of both sides, can pass, nats."""
    matrix = source_transition(STATES)
    begin = torch.full((STATES,), 1 / STATES, dtype=torch.float64)
    before = begin @ torch.linalg.matrix_power(matrix, place // 2 - 1)
    behind = matrix if both_sides else torch.full_like(matrix, 1 / STATES)
    joint = before[:, None, None] * matrix[:, :, None] * behind[None]
    return float(-(joint * (joint / joint.sum(dim=1, keepdim=True)).log()).sum())


register(
    *(
        Task(
            name=name,
            statement=statement,
            architecture="encoder",
            vocab_size=STATES + 1,
            length=LENGTH,
            chance=best_blind(PLACES[name]),
            best=best_of(PLACES[name], both_sides=both),
            loss_floor=least_loss(PLACES[name], both_sides=both),
            needs=("positions",),
            sample=_hiding(PLACES[name]),
            model="reader",
        )
        for name, statement, both in (
            ("continue", "which token comes last in a text from a Markov source?", False),
            ("infill", "which token of such a text is hidden between others?", True),
        )
    )
)

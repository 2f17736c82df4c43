"""What is watched while a model trains: accuracy, gradient norms by layer, attention entropy by layer and head."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from veriformer.ablations.tasks import Samples
from veriformer.ablations.training.scores import loss_and_accuracy
from veriformer.ablations.training.stacking import Stack

_LAYER = re.compile(r"^(?:(?P<owner>.*?)\.)?(?P<number>\d+)\.")
_GENERIC = frozenset(
    ("stack", "layers", "layer", "blocks", "block", "h", "model", "transformer", "module", "backbone", "body", "net")
)
_BEFORE = re.compile(
    r"(?:^|[._])(?:\w*embed\w*|wte|wpe|tokens?|tok|pos|positions?|patch|cls|extras|cnn|backbone|stem)(?:[._]|$)"
)


@dataclass
class Log:
    """What is collected while a stack trains; tensors stay on the device, `[..., seeds]`.

    Attributes:
        losses: cross-entropy of every step, on its batch, before the step; with dropout, without label smoothing.
        accuracies: of every step, on its batch.
        at: steps at which more is observed.
        probed: accuracies on unseen samples, by observation.
        norms: of gradients by part of the model, by observation but the last, after which no step comes.
        entropies: of attention by layer, by observation.
        tested_at: steps at which the loss on unseen samples is taken.
        tests: that loss in eval mode, by test.
    """

    losses: Tensor
    accuracies: Tensor
    at: list[int] = field(default_factory=list)
    probed: list[Tensor] = field(default_factory=list)
    norms: list[dict[str, Tensor]] = field(default_factory=list)
    entropies: list[list[Tensor]] = field(default_factory=list)
    tested_at: list[int] = field(default_factory=list)
    tests: list[Tensor] = field(default_factory=list)

    @torch.no_grad()
    def observe(self, step: int, stack: Stack, probe: Samples) -> None:
        """Write down what the stack, set to eval mode, makes of `probe` before `step`."""
        stack.train(False)
        logits, weights = stack.with_weights(*probe.inputs)
        self.at.append(step)
        self.probed.append(loss_and_accuracy(logits, probe.labels)[1])
        self.entropies.append([attention_entropy(w) for w in weights])

    @torch.no_grad()
    def test(self, step: int, stack: Stack, probe: Samples) -> None:
        """Write down the loss of the stack on `probe` before `step`: in eval mode, of hard targets."""
        stack.train(False)
        self.tested_at.append(step)
        self.tests.append(loss_and_accuracy(stack(*probe.inputs).float(), probe.labels)[0])


def part_of(parameter: str) -> str:
    """Return the part of the model that a parameter belongs to: a layer, or what stands before or after them.

    >>> part_of("stack.layers.3.attention.q_proj.weight"), part_of("classify.bias")
    ('layer 4', 'output')
    >>> part_of("transformer.h.0.mlp.weight"), part_of("encoder.layers.1.norm.weight"), part_of("bert.embeddings.word")
    ('layer 1', 'encoder layer 2', 'embedding')
    """
    found = _LAYER.match(parameter)
    if found:
        owners = [name for name in (found["owner"] or "").split(".") if name and name not in _GENERIC]
        return " ".join([*owners[-1:], f"layer {int(found['number']) + 1}"])
    return "embedding" if _BEFORE.search(parameter) else "output"


def gradient_norms(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the 2-norm of the gradient of each part, `[seeds]`, from stacked parameters `[seeds, ...]`."""
    return norms_by_part({n: p.grad for n, p in parameters.items() if p.grad is not None})


def norms_by_part(gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the 2-norm of each part's gradient, `[seeds]`, from gradients `[seeds, ...]` by parameter."""
    squares: dict[str, Tensor] = {}
    for name, gradient in gradients.items():
        if gradient.numel():
            square = gradient.reshape(len(gradient), -1).square().sum(dim=1)  # a parameter may be one number
            part = part_of(name)
            squares[part] = squares[part] + square if part in squares else square
    return {part: square.sqrt() for part, square in squares.items()}


def attention_entropy(weights: Tensor) -> Tensor:
    """Return the entropy of attention weights over that of uniform ones, by seed and head: 1 spread, 0 one key.

    A row that sees a single key has no choice and is left out; a key of weight zero counts as unseen only where a
    causal mask forbids it, which is told by the row's index.

    Args:
        weights: `[seeds, B, H, T, S]`; rows sum to one.
    """
    entropy = -torch.xlogy(weights, weights).sum(dim=-1)
    rows, keys = weights.shape[-2:]
    forbidden = rows == keys and bool((weights.triu(1) == 0).all())
    seen = torch.arange(1, rows + 1, device=weights.device) if forbidden else torch.full((rows,), keys)
    most = seen.to(weights).log()
    return (entropy / most)[..., most > 0].mean(dim=(1, 3))

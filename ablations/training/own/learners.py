"""Models that learn: one alone, or several seeds stacked by vmap; both give losses by seed and a plain module."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from torch.utils import _pytree as pytree

from veriformer.ablations.tasks import Task
from veriformer.ablations.training.own.losses import trained_on
from veriformer.ablations.training.own.watching import unfused

Losses = tuple[Tensor, Tensor]
"""Loss and accuracy of every seed, `[seeds]`."""


class Learners(Protocol):
    """The models of a job's seeds."""

    def trainable(self) -> list[Tensor]:
        """Return what the optimizer changes."""
        ...

    def train(self, mode: bool) -> None:
        """Set dropout and its like to train or eval mode."""
        ...

    def losses(self, batches: Sequence[Any]) -> Losses:
        """Return the loss and the accuracy of each seed on its batch."""
        ...

    def one(self, index: int) -> nn.Module:
        """Return the model of a seed as it is now, in eval mode; valid until the next call."""
        ...

    def gradients(self) -> Mapping[str, Tensor]:
        """Return the gradients by parameter, `[seeds, ...]`."""
        ...


class Alone:
    """One seed."""

    def __init__(self, model: nn.Module, task: Task, smoothing: float) -> None:
        self.model, self.task, self.smoothing = model, task, smoothing

    def trainable(self) -> list[Tensor]:
        """Return the parameters that are not frozen."""
        return [p for p in self.model.parameters() if p.requires_grad]

    def train(self, mode: bool) -> None:
        """Set dropout and its like to train or eval mode."""
        self.model.train(mode)

    def losses(self, batches: Sequence[Any]) -> Losses:
        """Return loss and accuracy, `[1]`."""
        loss, accuracy = trained_on(self.model, batches[0], self.task, self.smoothing)
        return loss[None], accuracy[None]

    def one(self, index: int) -> nn.Module:
        """Return the model in eval mode."""
        return self.model.eval()

    def gradients(self) -> Mapping[str, Tensor]:
        """Return the gradients by parameter, `[1, ...]`."""
        return {n: p.grad[None] for n, p in self.model.named_parameters() if p.grad is not None}


class _WithLoss(nn.Module):
    """A model whose output is its loss, so that parameters can be exchanged in the loss of anybody."""

    def __init__(self, model: nn.Module, task: Task, smoothing: float) -> None:
        super().__init__()
        self.model, self.task, self.smoothing = model, task, smoothing

    def forward(self, batch: Any) -> Losses:
        return trained_on(self.model, batch, self.task, self.smoothing)


class Together:
    """Several seeds of one architecture; parameters and buffers carry an axis for the seed."""

    def __init__(self, models: Sequence[nn.Module], task: Task, smoothing: float) -> None:
        shells = [_WithLoss(model, task, smoothing) for model in models]
        parameters, buffers = stack_module_state(shells)
        frozen = {n for n, p in shells[0].named_parameters() if not p.requires_grad}
        self.parameters = {n: p.detach().requires_grad_(n not in frozen) for n, p in parameters.items()}
        self.buffers = dict(buffers)
        self.shell = copy.deepcopy(shells[0])
        self._vmapped: Callable[..., Losses] = vmap(self._call, randomness="different")

    def _call(self, parameters: dict[str, Tensor], buffers: dict[str, Tensor], batch: Any) -> Losses:
        return functional_call(self.shell, (parameters, buffers), (batch,))

    def trainable(self) -> list[Tensor]:
        """Return the stacked parameters that are not frozen."""
        return [p for p in self.parameters.values() if p.requires_grad]

    def train(self, mode: bool) -> None:
        """Set dropout and its like to train or eval mode."""
        self.shell.train(mode)

    def losses(self, batches: Sequence[Any]) -> Losses:
        """Return loss and accuracy, `[seeds]`."""
        with unfused():  # vmap has no rule for the fused kernels, and would go through the seeds in a loop
            return self._vmapped(self.parameters, self.buffers, stacked(batches))

    def one(self, index: int) -> nn.Module:
        """Return the model of a seed in eval mode: a shell that holds views of its parameters."""
        model = self.shell.model.eval()
        for name, parameter in self.shell.named_parameters():
            parameter.data = self.parameters[name].detach()[index]
        for name, buffer in self.shell.named_buffers():
            buffer.data = self.buffers[name][index]
        return model

    def gradients(self) -> Mapping[str, Tensor]:
        """Return the gradients by parameter, `[seeds, ...]`."""
        return {n.removeprefix("model."): p.grad for n, p in self.parameters.items() if p.grad is not None}


class UnlikeError(ValueError):
    """The batches of the seeds cannot be stacked."""


def stacked(batches: Sequence[Any]) -> Any:
    """Return the batches of the seeds as one, with an axis for the seed.

    Raises:
        UnlikeError: they differ in structure or shape, or hold what is no tensor.
    """
    flat = [pytree.tree_flatten(batch) for batch in batches]
    leaves, structure = flat[0]
    for others, other in flat:
        if other != structure or [_form(x) for x in others] != [_form(x) for x in leaves]:
            raise UnlikeError("the batches of the seeds differ in structure or shape")
        if not all(isinstance(x, Tensor) for x in others):
            raise UnlikeError("its batches hold what is no tensor")
    return pytree.tree_unflatten([torch.stack(column) for column in zip(*(x for x, _ in flat), strict=True)], structure)


def _form(leaf: Any) -> Any:
    return (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else type(leaf)

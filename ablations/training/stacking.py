"""Several seeds of one model as a single one: parameters with an axis for the seed, a forward by vmap.

A tiny model keeps neither a GPU nor a core busy; a stack of them does. What a stack computes agrees with one-by-one
training to rounding, since no operation mixes seeds.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from veriformer.ablations.tasks import TASKS
from veriformer.ablations.trials.edits import EDITS
from veriformer.ablations.trials.models import MODELS
from veriformer.ablations.trials.trial import Trial


def build_one(trial: Trial) -> nn.Module:
    """Return the untrained model of a trial."""
    model = MODELS[TASKS[trial.task].model](trial.config, trial.seed)
    for edit in trial.edits:
        EDITS[edit](model)
    return model


class Stack:
    """Models of the same trial for several seeds.

    Attributes:
        parameters: of all models, by name, `[seeds, ...]`.
        shell: one of them, whose structure all share; its own parameters are not used.
    """

    def __init__(self, trials: Sequence[Trial]) -> None:
        self.trials = tuple(trials)
        device = trials[0].device
        models = [build_one(trial) for trial in trials]
        parameters, buffers = stack_module_state(models)
        self.parameters = {n: p.detach().to(device).requires_grad_() for n, p in parameters.items()}
        self.buffers = {n: b.to(device) for n, b in buffers.items()}
        self.shell = copy.deepcopy(models[0]).to(device)
        self._weights: list[Tensor] = []
        self._keeps = False
        for module in self.shell.modules():
            if hasattr(module, "num_heads"):
                module.register_forward_hook(self._keep)
        self._vmapped: Callable[..., Any] = vmap(self._call, randomness="different")

    def __len__(self) -> int:
        return len(next(iter(self.parameters.values())))

    def _keep(self, module: nn.Module, args: object, output: tuple[Tensor, Tensor]) -> None:
        if self._keeps:
            self._weights.append(output[1])

    def _call(self, parameters: dict[str, Tensor], buffers: dict[str, Tensor], *inputs: Tensor) -> Any:
        self._weights = []
        output = functional_call(self.shell, (parameters, buffers), inputs)
        return (output, tuple(self._weights)) if self._keeps else output

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Return outputs `[seeds, B, ...]` for inputs `[seeds, B, ...]`."""
        output: Tensor = self._vmapped(self.parameters, self.buffers, *inputs)
        return output

    def with_weights(self, *inputs: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return outputs and the attention weights `[seeds, B, H, T, S]` of every attention, in order of use."""
        self._keeps = True
        try:
            output, weights = self._vmapped(self.parameters, self.buffers, *inputs)
        finally:
            self._keeps = False
        return output, tuple(w for w in weights if w.ndim == 5)

    def train(self, mode: bool = True) -> None:
        """Set dropout and its like to train or eval mode."""
        self.shell.train(mode)

    def one(self, index: int) -> nn.Module:
        """Return the model of one seed, as it is now, in eval mode."""
        model = build_one(self.trials[index]).to(self.trials[index].device).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(self.parameters[name][index])
        return model

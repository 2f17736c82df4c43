"""Dropout that acts on scores: what a softmax is given is a product of which entries were dropped before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

_DROPS = ("dropout", "alpha_dropout", "feature_alpha_dropout", "feature_dropout")
_PRODUCTS = ("matmul", "bmm", "baddbmm", "einsum", "__matmul__", "__rmatmul__")
_SOFTMAX = ("softmax", "log_softmax")
_MIXES = ("linear", "layer_norm", "rms_norm", "embedding", "multi_head_attention_forward")
"""What gives as many numbers and yet mixes them: with these a product ends."""


class ScoresWatch(TorchFunctionMode):
    """Follows products of two tensors through operations that work entry by entry, as long as it is entered.

    Attributes:
        dropped: shape of each product that a dropout acted on before a softmax took it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.dropped: list[tuple[int, ...]] = []
        self._marks: dict[int, tuple[Tensor, bool]] = {}  # by id, with the tensor, so that no other one gets its id

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        name = getattr(func, "__name__", "")
        tensors = [x for x in tree_leaves((args, given)) if isinstance(x, Tensor)]
        marks = [(x.numel(), self._marks[id(x)][1]) for x in tensors if id(x) in self._marks]
        output = func(*args, **given)
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return output
        if name in _SOFTMAX:
            if any(is_dropped for _, is_dropped in marks):
                self.dropped.append(tuple(output.shape))
        elif name in _PRODUCTS:
            if len(tensors) > 1 and output.ndim > 2:
                self._marks[id(output)] = output, False
        elif name not in _MIXES and any(size == output.numel() for size, _ in marks):
            is_dropped = any(is_dropped for _, is_dropped in marks) or (name in _DROPS and _acts(args, given))
            self._marks[id(output)] = output, is_dropped
        return output


def _acts(args: tuple[Any, ...], given: dict[str, Any]) -> bool:
    rate = args[1] if len(args) > 1 else given.get("p", 0.5)
    acts = args[2] if len(args) > 2 else given.get("training", given.get("train", True))
    return bool(acts) and 0 < rate < 1


def scores_dropped(module: nn.Module, run: Callable[[], object]) -> list[list[int]]:
    """Return the shapes of the scores on which a dropout acts in train mode, each once."""
    with ScoresWatch() as watch, torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module.train()
        try:
            run()
        finally:
            module.eval()
    return [list(shape) for shape in dict.fromkeys(watch.dropped)]

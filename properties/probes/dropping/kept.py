"""What is kept of a tensor that random masks were multiplied with: by which factor, however the dropout is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from veriformer.properties.bench.watches import DispatchWatch

_DRAWS = ("bernoulli", "rand", "rand_like", "uniform", "random", "randint")
_MASKS = ("mul", "where", "masked_fill")
_FEWEST = 64  # entries of a mask whose share of ones can be told from another
_SIGMAS = 5.0  # a false alarm in a million masks
_OFF = 0.2
"""Of a factor: rates are told apart by their masks' shares, factors by what they are."""


class KeptWatch(DispatchWatch):
    """Follows random masks to what they are multiplied with, and on to the factor that is applied behind it.

    Attributes:
        kept: of each mask the share of its ones, its entries, and the factors on what is kept: its own value, and that
            times each number that follows at once, of which the last may be another scale.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[tuple[float, int, list[float]]] = []
        self._random: dict[int, Tensor] = {}  # by id, with the tensors, so that no other ones get their ids
        self._waiting: dict[int, tuple[Tensor, tuple[float, int, list[float]]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__.rstrip("_")
        tensors = [x for x in tree_leaves((args, kwargs or {})) if isinstance(x, Tensor)]
        masks = [x for x in tensors if id(x) in self._random]
        waiting = [self._waiting.pop(id(x))[1] for x in tensors if id(x) in self._waiting]
        output = func(*args, **(kwargs or {}))
        if not isinstance(output, Tensor):
            self.kept += waiting
            return output
        if name in _DRAWS or (masks and len(masks) == len([x for x in tensors if x.ndim])):
            self._random[id(output)] = output
        elif masks and name in _MASKS and output.is_floating_point():
            if (found := _ones_of(masks[0], is_hidden=name == "masked_fill")) is not None:
                self._waiting[id(output)] = output, found
        elif waiting and name in ("mul", "div") and (factor := _factor(name, args)) is not None:
            share, count, before = waiting[0]
            self._waiting[id(output)] = output, (share, count, [*before, before[-1] * factor])
            return output
        self.kept += waiting
        return output


def _ones_of(mask: Tensor, *, is_hidden: bool) -> tuple[float, int, list[float]] | None:
    """Return the share of what a mask keeps, its entries, and their one value; None of what is no mask."""
    plain = (~mask if is_hidden else mask).double() if mask.dtype == torch.bool else mask.double()
    ones = plain[plain != 0]
    if mask.numel() < _FEWEST or not 0 < ones.numel() < mask.numel() or float(ones.max() - ones.min()) > 1e-6:
        return None
    return ones.numel() / mask.numel(), mask.numel(), [float(ones[0])]


def _factor(name: str, args: Any) -> float | None:
    """Return the number by which a product or quotient multiplies its first factor; None where that is a tensor."""
    other = args[1] if len(args) > 1 else None
    if isinstance(other, Tensor):
        other = float(other) if not other.ndim else None
    if not isinstance(other, int | float) or not other:
        return None
    return 1 / other if name == "div" else float(other)


def wrong_factors(module: nn.Module, run: Callable[[], object], rate: float) -> list[float]:
    """Return the factors on what is kept by masks of a rate, which are not 1 / (1 - rate), in train mode.

    Args:
        module: that is called.
        run: calls it.
        rate: of the dropouts that are spoken of, as the shares of their masks show.
    """
    with KeptWatch() as watch, torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module.train()
        try:
            run()
        finally:
            module.eval()
    keep = 1 - rate
    found = set()
    for share, count, factors in watch.kept:
        is_of_rate = abs(share - keep) < _SIGMAS * (keep * rate / count) ** 0.5
        slack = max(_OFF, _SIGMAS * (share * (1 - share) / count) ** 0.5)  # of a mask of another rate, by its own share
        if is_of_rate and not any(min(abs(f * keep - 1), abs(f * share - 1) - slack + _OFF) <= _OFF for f in factors):
            found.add(round(factors[-1], 6))
    return sorted(found)

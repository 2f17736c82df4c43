"""Rows of embedding tables that have no gradient by design: that of the padding token.

This file imports torch alone: its source is pasted into standalone scripts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class EmbeddingWatch(TorchFunctionMode):
    """Notes which rows of which tables are read without a gradient while it is entered.

    Attributes:
        rows: pairs of a table and the row of its padding token; None for a table whose gradient is divided by counts.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[Tensor, int | None]] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func is nn.functional.embedding:
            names = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq")
            named = {**dict(zip(names, args, strict=False)), **given}
            if named.get("scale_grad_by_freq"):
                self.rows.append((named["weight"], None))
            elif named.get("padding_idx") is not None:
                self.rows.append((named["weight"], named["padding_idx"]))
        return func(*args, **given)


def trained_places(run: Callable[[], object], *leaves: Tensor) -> list[Tensor]:
    """Return, for each leaf, 1 where its gradient is to be the derivative and 0 where torch leaves it out.

    `nn.Embedding(padding_idx=i)` gives row i no gradient, though the output depends on it; with `scale_grad_by_freq`
    the gradient of a row is divided by how often it was read.

    Args:
        run: calls the model.
        leaves: floating point tensors that the output is differentiated by.
    """
    with EmbeddingWatch() as watch, torch.no_grad():
        run()
    places = [torch.ones_like(leaf, requires_grad=False) for leaf in leaves]
    for table, row in watch.rows:
        for leaf, place in zip(leaves, places, strict=True):
            if table is leaf:
                place[slice(None) if row is None else row] = 0
    return places

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
        rows: of each reading the table, the indices, and the row of its padding token (None for a table whose gradient
            is divided by counts).
    """

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[Tensor, Tensor, int | None]] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func is nn.functional.embedding:
            names = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq")
            named = {**dict(zip(names, args, strict=False)), **given}
            if named.get("scale_grad_by_freq"):
                self.rows.append((named["weight"], named["input"], None))
            elif named.get("padding_idx") is not None:
                self.rows.append((named["weight"], named["input"], named["padding_idx"]))
        return func(*args, **given)


def trained_places(run: Callable[[], object], tokens: list[Tensor], *leaves: Tensor) -> list[Tensor]:
    """Return, for each leaf, 1 where its gradient is to be the derivative and 0 where torch leaves it out.

    `nn.Embedding(padding_idx=i)` gives row i no gradient, though the output depends on it; with `scale_grad_by_freq`
    the gradient of a row is divided by how often it was read. A table of positions that leaves out a row which is read
    for real tokens too is another thing: it is never trained there.

    Args:
        run: calls the model.
        tokens: int64 `[B, T]`, what it is called on.
        leaves: floating point tensors that the output is differentiated by.
    """
    with EmbeddingWatch() as watch, torch.no_grad():
        run()
    places = [torch.ones_like(leaf, requires_grad=False) for leaf in leaves]
    for table, indices, row in watch.rows:
        if row is None or is_of_padding(indices == row % len(table), tokens):
            for leaf, place in zip(leaves, places, strict=True):
                if is_made_of(table, leaf):
                    place[slice(None) if row is None else row] = 0
    return places


def is_made_of(table: Tensor, leaf: Tensor) -> bool:
    """Whether a table is a leaf, or that times one number."""
    if table is leaf or table.shape != leaf.shape:
        return table is leaf
    scale = (table * leaf).sum() / (leaf * leaf).sum()
    return bool(((table - scale * leaf).abs() <= 1e-4 * table.abs().max()).all())


def is_of_padding(read: Tensor, tokens: list[Tensor]) -> bool:
    """Whether a row is read for one token and no other: for the padding. True where tokens cannot be told apart.

    Args:
        read: bool, where the row is read: `[B, T]`, or what broadcasts to that.
        tokens: int64 `[B, T]`; one of them is embedded.
    """
    for ids in tokens:
        if read.ndim <= ids.ndim and all(a in (1, b) for a, b in zip(read.shape[::-1], ids.shape[::-1], strict=False)):
            places = read.expand(ids.shape)
            found = ids[places]
            if not found.numel() or bool((found == found[0]).all()):
                return True
        else:
            return True
    return False

"""Part of what a task is given to train on, kept from training to test on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

SHARE = 0.2
"""Of the data, where none was given to test on."""


def parted(data: Any) -> tuple[Any, Any] | None:
    """Return what is trained on and what is held out; None where the data cannot be parted.

    Rows of tensors, items of a Dataset (also behind a DataLoader) and batches of a list are drawn once, the same for
    every seed and variant.

    Args:
        data: a tuple of tensors, a Dataset with a length, a DataLoader of one, or a list of batches.
    """
    if isinstance(data, DataLoader):
        sides = parted(data.dataset) if data.batch_size is not None else None
        return None if sides is None else (_loader(data, sides[0], True), _loader(data, sides[1], False))
    if isinstance(data, tuple) and data and all(isinstance(x, Tensor) for x in data):
        chosen = _drawn(len(data[0]))
        return None if chosen is None else tuple(tuple(x[list(rows)] for x in data) for rows in chosen)  # type: ignore[return-value]
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset) and hasattr(data, "__len__"):
        chosen = _drawn(len(data))
        return None if chosen is None else (Subset(data, chosen[0]), Subset(data, chosen[1]))
    if isinstance(data, list):
        chosen = _drawn(len(data))
        return None if chosen is None else ([data[i] for i in chosen[0]], [data[i] for i in chosen[1]])
    return None


def _drawn(number: int) -> tuple[Sequence[int], Sequence[int]] | None:
    """Return which of so many are trained on and which are held out; None where one side would be empty."""
    aside = round(SHARE * number)
    if aside == 0:
        return None
    order = torch.randperm(number, generator=torch.Generator().manual_seed(0)).tolist()
    return sorted(order[aside:]), sorted(order[:aside])


def _loader(like: DataLoader[Any], dataset: Any, trains: bool) -> DataLoader[Any]:
    return DataLoader(
        dataset, batch_size=like.batch_size, shuffle=trains, num_workers=like.num_workers, collate_fn=like.collate_fn,
        drop_last=like.drop_last and trains,
    )  # fmt: skip

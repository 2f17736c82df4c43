"""Whose keys and values each head of a cached attention uses, held against those of the whole run."""

from __future__ import annotations

import torch
from torch import Tensor

from veriformer.properties.diagnosis.attentions import Attended, near


def head_cause(begins: str, got: Attended, expected: Attended, end: int) -> str | None:
    """Say which key-value heads the query heads read with the cache, where it is not those of the whole run.

    Args:
        begins: which chunk, in words.
        got: the attention of a chunk.
        expected: that of the whole run.
        end: tokens up to the end of the chunk.
    """
    many = got.key.shape[-2]
    if got.key.shape[:-2] != expected.key.shape[:-2] or got.key.ndim < 4 or many > end:
        return None
    found = {}
    for name, mine, whole in (("keys", got.key, expected.key), ("values", got.value, expected.value)):
        read = _read(_by_head(mine), _by_head(whole[..., end - many : end, :]))
        if read is None:
            return None
        found[name] = read
    wrong = {name: read for name, read in found.items() if read[0] != read[1]}
    if not wrong:
        return None
    which = " and ".join(wrong)
    cached, right = next(iter(wrong.values()))
    told = (
        f"in {begins}, heads {list(range(len(right)))} use the {which} of the key-value heads {cached} with "
        f"the cache and of {right} without"
    )
    heads, groups = len(right), len(set(right))
    if cached == [h % groups for h in range(heads)] and right == [h * groups // heads for h in range(heads)]:
        told += ": with the cache they are repeated as a whole (repeat) instead of each in place (repeat_interleave)"
    elif right == [h % groups for h in range(heads)] and cached == [h * groups // heads for h in range(heads)]:
        told += ": with the cache each is repeated in place (repeat_interleave) instead of all as a whole (repeat)"
    return told


def _by_head(value: Tensor) -> Tensor:
    """Return `[H, B, S, K]` of rows that may be grouped."""
    return value.flatten(1, -3).transpose(0, 1).double()


def _read(mine: Tensor, whole: Tensor) -> tuple[list[int], list[int]] | None:
    """Return which key-value head each query head uses, cached and not; None where that is not one of those."""
    limit = near(whole.float()) * float(whole.abs().max())
    distinct: list[Tensor] = []
    right = []
    for head in whole:
        same = [g for g, known in enumerate(distinct) if float((head - known).abs().max()) <= limit]
        if not same:
            same = [len(distinct)]
            distinct.append(head)
        right.append(same[0])
    cached = []
    for head in mine:
        apart = torch.stack([(head - known).abs().max() for known in distinct])
        if float(apart.min()) > limit:
            return None
        cached.append(int(apart.argmin()))
    return cached, right

"""Whose padding mask, and whose length, is used for which sample."""

from __future__ import annotations

import torch
from torch import Tensor

from veriformer.properties.diagnosis.places.arrangements import mask_of_another
from veriformer.properties.diagnosis.places.batches import BATCH, LENGTH, Batches, longest

_BASE, _MORE, _LESS = 4, 6, 2
"""Tokens of every sample, and of the one whose mask is changed."""


def whose_mask(batches: Batches) -> str | None:
    """Change one sample's mask, not its tokens, and see whose outputs change."""
    if not batches.takes_mask or longest(batches.case) < LENGTH:
        return None
    if told := mask_of_another(batches):
        return told
    heads = batches.built.config.num_heads
    size = max(BATCH, 2 * heads + 1)
    x = batches.draw(size, LENGTH)
    base = batches.masks([_BASE] * size, LENGTH)
    start = batches.together(x, base)
    longer, shorter = (_reached(batches, x, base, start, length) for length in (_MORE, _LESS))
    reached = longer | shorter
    others = reached & ~torch.eye(size, dtype=torch.bool)
    changed = batches.draw(size, LENGTH)
    changed[1:-1] = x[1:-1]
    if not bool(others.any()) or batches.differs(batches.together(changed, base)[1:-1], start[1:-1]):
        return None  # what the tokens of another sample are matters too, not its mask alone
    every = torch.ones(size, dtype=torch.bool)
    for at, which in ((0, "first"), (size - 1, "last")):
        rest = every.clone()
        rest[at] = False
        if bool(others[at][rest].all()) and not bool(others[rest].any()):
            return _from_one(batches, x, at, which)
    sources = [set(others[:, b].nonzero().flatten().tolist()) for b in range(size)]
    tiled = [{(b * heads + h) % size for h in range(heads)} for b in range(size)]
    if heads > 1 and sources == [found - {b} for b, found in enumerate(tiled)]:
        return (
            f"the heads of sample 1 get the padding masks of samples {' and '.join(map(str, sorted(tiled[1])))}: the "
            "mask is tiled over heads (repeat) where each sample's must be repeated one after another "
            "(repeat_interleave)"
        )
    if all(len(found) <= 1 for found in sources):
        given = [min(found, default=b) for b, found in enumerate(sources)]
        mask = batches.masks([3 + b % 4 for b in range(size)], LENGTH)
        if _is_that_of(batches, x, mask, mask[given]):
            told = ", ".join(
                f"sample {b} gets the padding mask of sample {source}" for b, source in enumerate(given[:2])
            )
            return f"{told}: masks stand in another order than samples"
        return None
    before = torch.ones(size, size, dtype=torch.bool).triu(1)
    if torch.equal(others, before):
        return (
            "a sample's outputs change with the number of real tokens of the samples before it, not with what these "
            "are: positions or offsets are counted on through the batch instead of anew in each sample"
        )
    if bool((others | torch.eye(size, dtype=torch.bool)).all()):
        if bool((longer | torch.eye(size, dtype=torch.bool)).all()) and not bool(
            (shorter & ~torch.eye(size, dtype=torch.bool)).any()
        ):
            return "every sample's outputs change when another becomes the longest: the longest length is used for all"
        return (
            "every sample's outputs change with the number of real tokens of any other, not with what these are: a "
            "count or a sum over the whole batch is used"
        )
    return None


def _reached(batches: Batches, x: Tensor, base: Tensor, start: Tensor, length: int) -> Tensor:
    """Return `[B, B]`: whether another number of real tokens of sample m changes sample b, where b is real before."""
    rows = []
    for m in range(len(x)):
        mask = base.clone()
        mask[m] = batches.masks([length], LENGTH)[0]
        got = batches.together(x, mask)
        keep = base & mask if batches.per_position else None
        changed = batches.rows_differ(got, start)
        rows.append((changed & keep).any(1) if keep is not None else changed.reshape(len(x), -1).any(1))
    return torch.stack(rows).cpu()


def _is_that_of(batches: Batches, x: Tensor, mask: Tensor, used: Tensor) -> bool:
    """Whether the outputs under one mask are those of each sample alone under another, where both leave tokens."""
    rows = mask & used if batches.per_position else slice(None)
    return not batches.differs(batches.together(x, mask)[rows], batches.alone(x, used)[rows])


def _from_one(batches: Batches, x: Tensor, at: int, which: str) -> str:
    """Say what of one sample's mask all others get."""
    size = len(x)
    lengths = [5 if b == at else 6 for b in range(size)]
    mask = batches.masks(lengths, LENGTH)
    got = batches.together(x, mask)
    if batches.per_position:
        other = 1 if at == 0 else 0
        beyond = (mask[other] & ~mask[at]).nonzero().flatten()
        if bool((got[other, beyond] == 0).all()):
            return (
                f"with {lengths[at]} tokens in the {which} sample and {lengths[other]} in another, the other's last "
                f"output is zero: all samples are cut at the length of the {which}"
            )
    if all(
        _is_that_of(batches, x, mask, mask[at : at + 1].expand_as(mask))
        for mask in (batches.masks([n if b == at else 4 for b in range(size)], LENGTH) for n in (3, 6))
    ):
        what = "" if batches.per_position else " (its length, the place of its last token)"
        return f"the padding mask of the {which} sample{what} is used for all samples"
    if batches.per_position:
        return f"every sample's outputs change with the padding mask of the {which} sample, not with its tokens"
    lengths = [4 + b % 3 for b in range(size)]
    mask = batches.masks(lengths, LENGTH)
    wrong = batches.rows_differ(batches.together(x, mask), batches.alone(x, mask)).tolist()
    same = [length == lengths[at] for length in lengths]
    told = (
        f"every sample's output changes with the number of real tokens of the {which} sample, not with what these are"
    )
    if all(bad != alike for bad, alike in zip(wrong, same, strict=True)):
        return (
            f"{told}, and only samples as long as the {which} are right: the length (the place of the last token) of "
            f"the {which} sample is used for all"
        )
    return told

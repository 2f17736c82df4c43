"""Beams that share what they were taken from, and positions that stay where the beams do not."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from veriformer.properties.diagnosis.caches.runs import CachedRuns
from veriformer.properties.diagnosis.places.lookups import lookups

_FORKED = [1, 1, 0, 2]
_NEW = 2
_PASTS = (2, 3, 4, 5)
"""Of every length that a page may have left over."""


def forked_cause(runs: CachedRuns) -> str | None:
    """Say that two beams of one sample write into one place: what one is fed reaches the other."""
    for past in _PASTS:
        x = runs.tokens(len(_FORKED), past + _NEW)
        order = torch.tensor(_FORKED, device=x.device)
        changed = x.clone()
        changed[1, past:] = (x[1, past:] + 1) % runs.built.config.vocab_size
        before, after = (runs.cached(y, [past, _NEW], reorder=order)[:, past:] for y in (x, changed))
        moved = (after - before).abs().amax(dim=(1, 2)) > runs.limit(before)
        if moved.tolist() == [True, True, False, False]:
            return (
                "two beams that go on from one sample write into one place: what the second is fed reaches the first, "
                "and samples that are taken once are right. What they share (a page, a buffer) is not copied before it "
                "is written to"
            )
    return None


def places_cause(runs: CachedRuns, x: Tensor, order: Tensor, mask: Tensor, past: int) -> str | None:
    """Say that each sample goes on at its own next position after a reordering, and not at that of whose past it has.

    Args:
        runs: of the subject.
        x: tokens `[B, T]`.
        order: of the samples, applied behind the first chunk.
        mask: padding mask `[B, T]`, in which samples have not as many real tokens.
        past: length of the first chunk.
    """
    built = runs.clean()
    if not isinstance(built.module, nn.Module):
        return None
    real, new = mask[:, :past].sum(1), x.shape[1] - past
    steps = torch.arange(new, device=x.device)
    wanted, own = real[order][:, None] + steps, real[:, None] + steps
    looks = lookups(built.module, lambda: runs.cached(x, [past, new], mask, reorder=order, on=built))
    for look in looks:
        if look.rows.numel() != own.numel() or torch.equal(look.rows.reshape(own.shape), x[:, past:]):
            continue
        rows = look.rows.reshape(own.shape)
        offset = int(rows[0, 0] - own[0, 0])
        if torch.equal(rows, own + offset) and not torch.equal(own, wanted):
            return (
                f"after a reordering the next tokens stand at rows {rows[:, 0].tolist()} of {look.name}, each behind "
                f"its own past of {real.tolist()} tokens, where it goes on behind {real[order].tolist()}: keys and "
                "values are reordered, the next positions are not"
            )
    return None

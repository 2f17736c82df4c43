"""Whose mask each sample of a batch follows, and where its tokens stand."""

from __future__ import annotations

import torch
from torch import Tensor

from veriformer.properties.diagnosis.masks.masked import Masked
from veriformer.properties.diagnosis.masks.placed import placed_in_batch
from veriformer.properties.diagnosis.masks.pooled import ends_of_others, pooled_for_others

_LEAST = 1e-9  # a weight below is that of a hidden key


def at_real(masked: Masked, moved: Tensor, real: Tensor) -> Tensor:
    """Return what moved among the outputs that count."""
    return moved[real] if masked.per_position else moved


def cause_of_others(masked: Masked, side: str) -> str | None:
    """Give the samples of a batch different masks, and find whose mask each follows."""
    x = masked.draw(3)
    ends = masked.padded(x, [masked.length - 3, masked.length - 1, max(1, masked.length - 6)], side)
    holes = torch.ones_like(ends)
    for b in range(len(x)):
        holes[b, min(2 * b + 1, masked.length - 1)] = False  # first, later, last: each at a place of its own
    if masked.case.subject.kind == "classifier" and (told := pooled_for_others(masked) or ends_of_others(masked)):
        return told
    if told := placed_in_batch(masked, ends):
        return told
    for mask in (holes, ends) if masked.side == "both" else (ends,):
        if told := _followed(masked, x, mask):
            return told
    return None


def _followed(masked: Masked, x: Tensor, mask: Tensor) -> str | None:
    count = len(x)
    before = masked(x, mask)

    def follows(used: list[Tensor]) -> bool:
        """Return whether each sample gives what it gives alone under a mask, where that mask and its own are real."""
        alone = torch.cat([masked(x[b : b + 1], used[b][None]) for b in range(count)])
        return not bool(at_real(masked, masked.moved(before, alone), mask & torch.stack(used)).any())

    own = list(mask)
    if follows(own):
        return None
    candidates = {
        "every sample of a batch is masked by the mask of the first": [mask[0]] * count,
        "what the mask of the first sample hides is hidden, or cut off, in all samples": [m & mask[0] for m in own],
        "every sample of a batch is masked by the mask of the last": [mask[-1]] * count,
        "a position is hidden only where all samples of the batch hide it": [mask.any(0)] * count,
        "a position is hidden in all samples where one hides it": [mask.all(0)] * count,
        "the samples' masks are used in reversed order": own[::-1],
    }
    for told, used in candidates.items():
        if follows(used):
            return f"in a batch of samples with different masks {told}"
    return _tiled(masked, x, mask, masked.built.config.num_heads)


def _tiled(masked: Masked, x: Tensor, mask: Tensor, heads: int) -> str | None:
    """Read off the weights whose mask each head of each sample has."""
    seen = masked.attended(x, mask)
    if not seen:
        return None
    weights = seen[0].weights.flatten(0, -3).cpu()
    count = len(mask)
    if len(weights) != count * heads or heads < 2:
        return None
    shown = (weights > _LEAST).any(dim=1)  # [B * H, S]: some query gives it weight
    whose = [[m for m in range(count) if not bool((shown[i] & ~mask[m].cpu()).any())] for i in range(len(weights))]
    if all(i % count in own for i, own in enumerate(whose)) and not all(
        i // heads in own for i, own in enumerate(whose)
    ):
        return (
            "in a batch, heads of a sample are masked by the masks of other samples (head h of sample b by that of "
            "sample (b H + h) mod B): the mask is tiled over the heads (repeat) instead of repeated for each "
            "(repeat_interleave)"
        )
    return None

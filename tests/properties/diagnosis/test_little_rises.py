"""A softmax in blocks that spares rescalings where a maximum rises by little, and takes the new one all the same."""

from __future__ import annotations

import torch
from torch import Tensor

from veriformer.properties.formulas.streamed import streamed_cause

_BLOCK, _SPARED = 4, 8.0


def _weights(scores: Tensor, *, stays: bool) -> Tensor:
    top = torch.full_like(scores[:, :1], -torch.inf)
    weights = torch.zeros_like(scores)
    for start in range(0, scores.shape[1], _BLOCK):
        block = scores[:, start : start + _BLOCK]
        new = torch.maximum(top, block.amax(-1, keepdim=True))
        grows = new - top > _SPARED
        weights = weights * torch.where(grows, (top - new).exp(), torch.ones_like(top))
        top = torch.where(grows, new, top) if stays else new
        weights[:, start : start + _BLOCK] = (block - top).exp()
    return weights / weights.sum(-1, keepdim=True)


def test_rises_that_are_spared_are_told_from_those_that_are_not() -> None:
    generator = torch.Generator().manual_seed(1)
    steps = torch.tensor([0.0, 2.0, 22.0, 24.0, 44.0, 46.0], dtype=torch.float64).repeat_interleave(_BLOCK)
    scores = torch.randn(6, len(steps), generator=generator, dtype=torch.float64) + steps
    told = streamed_cause(scores, _weights(scores, stays=False), 1e-9)
    assert told is not None
    assert told.startswith("blocks of 4 keys: either sum")
    assert "raises the maximum by little" in told
    assert streamed_cause(scores, _weights(scores, stays=True), 1e-9) is None

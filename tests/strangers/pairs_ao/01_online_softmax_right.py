"""Softmax whose statistics stream over the axis in blocks: one pass for maximum and sum, one for the quotient."""

import torch

from veriformer.properties import Subject

BLOCK = 16


def _finite(peak):
    return peak.masked_fill(peak == -torch.inf, 0.0)


def _statistics(x):
    """Maximum of the last axis and sum of exp(x - maximum), block by block."""
    first, *rest = x.split(BLOCK, dim=-1)
    peak = first.detach().amax(-1, keepdim=True)
    total = (first - _finite(peak)).exp().sum(-1, keepdim=True)
    for block in rest:
        new = torch.maximum(peak, block.detach().amax(-1, keepdim=True))
        shift = _finite(new)
        total = total * (peak - shift).exp() + (block - shift).exp().sum(-1, keepdim=True)
        peak = new
    return _finite(peak), total


def online_softmax(scores, dim=-1):
    x = scores.movedim(dim, -1)
    if x.dtype in (torch.float16, torch.bfloat16):
        x = x.float()
    peak, total = _statistics(x)
    return ((x - peak).exp() / total).to(scores.dtype).movedim(-1, dim)


subject = Subject(
    kind="softmax",
    name="online softmax",
    forward=lambda model, scores, dim=-1: online_softmax(scores, dim),
    declares={"empty_row": "nan"},
)

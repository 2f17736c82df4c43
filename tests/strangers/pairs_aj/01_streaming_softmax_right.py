"""Softmax that reads a row block by block: one running maximum, one running sum, then one pass that writes."""

import torch

from veriformer.properties import Subject

BLOCK = 16


def _exp(x, shift):
    """exp(x - shift), and 0 where nothing has been seen so far (shift is -inf)."""
    shift = torch.where(torch.isinf(shift) & (shift < 0), torch.zeros_like(shift), shift)
    return torch.exp(x - shift)


def streaming_softmax(scores, dim=-1):
    x = scores.movedim(dim, -1)
    work = x.double() if x.dtype == torch.float64 else x.float()
    length = work.shape[-1]
    full = length - length % BLOCK

    running_max = torch.full_like(work[..., :1], -torch.inf)
    running_sum = torch.zeros_like(running_max)
    for start in range(0, full, BLOCK):
        block = work[..., start : start + BLOCK]
        new_max = torch.maximum(running_max, block.amax(-1, keepdim=True))
        running_sum = running_sum * _exp(running_max, new_max) + _exp(block, new_max).sum(-1, keepdim=True)
        running_max = new_max

    if full < length:  # what is left over, shorter than a block
        tail = work[..., full:]
        new_max = torch.maximum(running_max, tail.amax(-1, keepdim=True))
        running_sum = running_sum * _exp(running_max, new_max) + _exp(tail, new_max).sum(-1, keepdim=True)
        running_max = new_max

    weights = _exp(work, running_max) / running_sum.clamp_min(torch.finfo(work.dtype).tiny)
    return weights.to(scores.dtype).movedim(-1, dim)


subject = Subject(
    kind="softmax",
    name="streaming softmax",
    forward=lambda model, scores, dim=-1: streaming_softmax(scores, dim),
)

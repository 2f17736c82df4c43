WHAT = 'the running sum is not rescaled by exp(old maximum - new maximum) when the ragged last block (size no multiple of 4) brings a new maximum (line 34), so the rows sum to something else than 1'
"""Softmax that reads its row block by block and keeps a running maximum and a running sum."""
import torch

from veriformer.properties import Subject

BLOCK = 4


def finite(peak):
    """What is subtracted: the maximum, or zero where nothing but -inf was seen."""
    return peak.masked_fill(peak == -torch.inf, 0.0)


def streaming_softmax(scores, dim=-1):
    rows = scores.movedim(dim, -1)
    if rows.dtype in (torch.float16, torch.bfloat16):
        rows = rows.float()
    size = rows.shape[-1]
    even = size - size % BLOCK
    best = rows.new_full(rows.shape[:-1], -torch.inf)
    total = rows.new_zeros(rows.shape[:-1])

    for block in rows[..., :even].split(BLOCK, dim=-1) if even else ():
        peak = torch.maximum(best, block.detach().amax(-1))
        shift = finite(peak)
        total = total * (best - shift).exp() + (block - shift.unsqueeze(-1)).exp().sum(-1)
        best = peak

    if even < size:
        tail = rows[..., even:]
        peak = torch.maximum(best, tail.detach().amax(-1))
        shift = finite(peak)
        total = total + (tail - shift.unsqueeze(-1)).exp().sum(-1)
        best = peak
    shift = finite(best)

    weights = (rows - shift.unsqueeze(-1)).exp() / total.unsqueeze(-1)
    return weights.to(scores.dtype).movedim(-1, dim)


subject = Subject(
    kind="softmax",
    name="streaming softmax",
    forward=lambda model, scores, dim=-1: streaming_softmax(scores, dim),
)

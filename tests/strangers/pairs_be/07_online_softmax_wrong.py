WHAT = "the axis moved to the end with movedim is brought back with transpose, which exchanges the other axes too unless dim is the last or last but one: along an earlier axis of three the weights come out transposed: line 23."
"""Softmax in one pass over blocks (running maximum and running sum), along any axis."""

import torch

from veriformer.properties import Subject

BLOCK = 8


def online_softmax(scores, dim=-1):
    rows = scores.movedim(dim, -1)
    flat = rows.reshape(-1, rows.shape[-1])
    best = flat.new_full((flat.shape[0], 1), float("-inf"))
    total = flat.new_zeros(flat.shape[0], 1)
    for block in flat.split(BLOCK, dim=1):
        new_best = torch.maximum(best, block.detach().amax(dim=1, keepdim=True))
        shift = torch.where(new_best.isinf(), torch.zeros_like(new_best), new_best)
        total = total * torch.exp(best - shift) + torch.exp(block - shift).sum(dim=1, keepdim=True)
        best = new_best
    shift = torch.where(best.isinf(), torch.zeros_like(best), best)
    weights = torch.exp(flat - shift) / total
    return weights.view(rows.shape).transpose(-1, dim)


subject = Subject(
    kind="softmax",
    name="online softmax",
    forward=lambda model, scores, dim=-1: online_softmax(scores, dim),
    declares={"empty_row": "nan"},
)

"""Softmax in blocks of a power of two with a running maximum and sum."""

import torch
import torch.nn.functional as F

from veriformer.properties import Subject

MAX_BLOCK = 1024
NEG_INF = float("-inf")


def load(row, start, block):
    """One block of the row; lanes past its end hold what does not count."""
    part = row[..., start : start + block]
    return F.pad(part, (0, block - part.shape[-1]), value=NEG_INF)


def blocked_softmax(model, scores, dim=-1):
    x = scores.movedim(dim, -1)
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    n = x.shape[-1]
    block = min(MAX_BLOCK, 1 << max(n - 1, 0).bit_length())

    best = torch.full(x.shape[:-1] + (1,), NEG_INF, dtype=x.dtype, device=x.device)
    total = torch.zeros_like(best)
    for start in range(0, n, block):
        part = load(x, start, block)
        new = torch.maximum(best, part.detach().amax(-1, keepdim=True))
        base = new.masked_fill(new == NEG_INF, 0.0)
        total = total * (best - base).exp() + (part - base).exp().sum(-1, keepdim=True)
        best = new

    base = best.masked_fill(best == NEG_INF, 0.0)
    out = (x - base).exp() / total.masked_fill(total == 0, 1.0)
    return out.to(scores.dtype).movedim(-1, dim)


subject = Subject(
    kind="softmax",
    name="blocked softmax",
    forward=blocked_softmax,
    declares={},
)

WHAT = 'the row is padded to a multiple of 8 lanes with the score 0 instead of -inf (F.pad in lane_sum_exp), so that the denominator has exp(0 - max) for each padded lane and rows sum to less than 1'
"""Softmax as in the SIMD kernel: eight partial sums (lanes), then a horizontal add."""
import torch
import torch.nn.functional as F

from veriformer.properties import Subject

LANES = 8


def lane_sum_exp(x, top):
    """Sum of exp(x - top) over the last axis, in LANES accumulators."""
    n = x.shape[-1]
    x = F.pad(x, (0, -n % LANES), value=0.0)
    acc = torch.exp(x - top).unflatten(-1, (-1, LANES)).sum(-2)
    while acc.shape[-1] > 1:  # horizontal add: 8 -> 4 -> 2 -> 1
        lo, hi = acc.chunk(2, dim=-1)
        acc = lo + hi
    return acc


def softmax(model, scores, dim=-1):
    dtype = scores.dtype
    x = scores.movedim(dim, -1)
    if dtype in (torch.float16, torch.bfloat16):
        x = x.float()
    top = x.detach().amax(-1, keepdim=True)
    y = torch.exp(x - top) / lane_sum_exp(x, top)
    return y.movedim(-1, dim).to(dtype)


subject = Subject(kind="softmax", name="lane softmax", forward=softmax)

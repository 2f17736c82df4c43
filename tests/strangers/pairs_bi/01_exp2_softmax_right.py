"""Softmax with our own exp2: integer part by the exponent, fraction by a polynomial (port of the DSP kernel)."""
import math

import torch

from veriformer.properties import Subject

LOG2E = 1.4426950408889634
# 2^f = sum (f ln 2)^k / k!  on [0, 1)
COEFFICIENTS = [math.log(2) ** k / math.factorial(k) for k in range(20)]


def exp2_poly(f):
    acc = torch.full_like(f, COEFFICIENTS[-1])
    for c in reversed(COEFFICIENTS[:-1]):
        acc = acc * f + c
    return acc


def exp2(t):
    """2^t for t <= 0."""
    t = t.clamp(min=-1000.0)
    n = t.floor()
    f = t - t.floor()
    return exp2_poly(f) * torch.exp2(n.detach())


def softmax(scores, dim=-1):
    work = scores.float() if scores.dtype in (torch.float16, torch.bfloat16) else scores
    hidden = work == -math.inf
    top = work.detach().amax(dim, keepdim=True)
    top = torch.where(top == -math.inf, torch.zeros_like(top), top)
    t = (work.masked_fill(hidden, 0.0) - top) * LOG2E
    e = exp2(t.masked_fill(hidden, 0.0)).masked_fill(hidden, 0.0)
    return (e / e.sum(dim, keepdim=True)).to(scores.dtype)


subject = Subject(
    kind="softmax",
    name="softmax with a hand-made exp2",
    forward=lambda model, scores, dim=-1: softmax(scores, dim),
)

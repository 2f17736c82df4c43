"""Softmax in powers of two, its statistics merged from pieces of at most four as a kernel would do it; dim may be any axis.

Unusual: exp(x) is exp2(x log2 e). Each piece of the axis yields (largest, sum of powers), and two pieces are merged by scaling
the sum whose largest is smaller. A row of nothing but -inf gives zeros rather than NaN, and a zero gradient.
"""

import math

import torch
from torch import Tensor, nn

from veriformer.properties import Subject

LOG2E = 1.0 / math.log(2.0)
PIECE = 4


def finite(top: Tensor) -> Tensor:
    return top.masked_fill(top == -math.inf, 0.0)


def statistics(z: Tensor) -> tuple[Tensor, Tensor]:
    """z [..., n] -> its largest, without gradient, and the sum of 2^(z - largest), [..., 1] each."""
    n = z.size(-1)
    if n <= PIECE:
        top = z.detach().amax(dim=-1, keepdim=True)
        return top, torch.exp2(z - finite(top)).sum(dim=-1, keepdim=True)
    (top_a, sum_a), (top_b, sum_b) = statistics(z[..., : n // 2]), statistics(z[..., n // 2 :])
    top = torch.maximum(top_a, top_b)
    return top, sum_a * torch.exp2(top_a - finite(top)) + sum_b * torch.exp2(top_b - finite(top))


class BaseTwoSoftmax(nn.Module):
    def forward(self, scores: Tensor, dim: int = -1) -> Tensor:
        # first the shift, then the change of base: the difference of two large scores is exact, their multiples are not
        peak = finite(scores.detach().amax(dim=dim, keepdim=True))
        z = ((scores - peak) * LOG2E).movedim(dim, -1)
        top, total = statistics(z)
        shares = torch.exp2(z - finite(top)) / total.masked_fill(total == 0, 1.0)
        return shares.movedim(-1, dim)


COMMON = dict(
    kind="softmax",
    build=lambda c: BaseTwoSoftmax(),
    forward=lambda m, scores, dim=-1: m(scores, dim),
)
undeclared = Subject(**COMMON)
declared = Subject(**COMMON, declares={"empty_row": "zeros"})

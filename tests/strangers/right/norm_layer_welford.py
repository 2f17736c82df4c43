"""LayerNorm whose mean and variance are merged pair by pair (Chan's form of Welford's method), as a GPU kernel reduces them.

Unusual: no sum over all channels is taken; each half yields (count, mean, sum of squared deviations) and two are merged without
cancellation. The variance is the biased one. Channels are first moved to the front.
"""

import torch
from torch import nn

from veriformer.properties import Subject


def moments(x):  # [n, ...] -> n, mean, sum of squared deviations
    n = x.size(0)
    if n == 1:
        return 1, x[0], torch.zeros_like(x[0])
    n_a, mean_a, m2_a = moments(x[: n // 2])
    n_b, mean_b, m2_b = moments(x[n // 2 :])
    delta = mean_b - mean_a
    mean = mean_a + delta * (n_b / n)
    return n, mean, m2_a + m2_b + delta.square() * (n_a * n_b / n)


class WelfordLayerNorm(nn.Module):
    def __init__(self, width, eps=1e-5):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))
        self.shift = nn.Parameter(torch.zeros(width))
        self.eps = eps

    def forward(self, x):
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        n, mean, m2 = moments(wide.movedim(-1, 0))
        normed = (wide - mean.unsqueeze(-1)) * torch.rsqrt(m2 / n + self.eps).unsqueeze(-1)
        return torch.addcmul(self.shift, normed.to(x.dtype), self.gain)


COMMON = dict(kind="norm", build=lambda c: WelfordLayerNorm(c.d_model), forward=lambda m, x: m(x))
undeclared = Subject(**COMMON)
declared = Subject(**COMMON, declares={"norm": "layer", "norm_bias": True})

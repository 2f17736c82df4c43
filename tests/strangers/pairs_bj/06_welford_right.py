"""LayerNorm whose statistics come from lanes, each with its own Welford triple, merged in a tree (as a warp does)."""

import torch
from torch import nn

from veriformer.properties import Subject

LANES = 4


def lane_statistics(part):
    mean = part.mean(-1)
    return part.shape[-1], mean, (part - mean[..., None]).square().sum(-1)


def merge(a, b):
    n_a, mean_a, m2_a = a
    n_b, mean_b, m2_b = b
    n = n_a + n_b
    delta = mean_b - mean_a
    mean_a = mean_a + (mean_b - mean_a) * (n_b / n)
    m2 = m2_a + m2_b + delta * delta * (n_a * n_b / n)
    return n, mean_a, m2


def welford(x):
    lanes = min(LANES, x.shape[-1])
    partial = [lane_statistics(x[..., lane::lanes]) for lane in range(lanes)]
    while len(partial) > 1:
        half = (len(partial) + 1) // 2
        upper = partial[half:]
        partial = [merge(a, upper[i]) if i < len(upper) else a for i, a in enumerate(partial[:half])]
    n, mean, m2 = partial[0]
    return mean[..., None], (m2 / n)[..., None]


class WelfordLayerNorm(nn.Module):
    def __init__(self, dim, eps=1e-5):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(dim))
        self.beta = nn.Parameter(torch.zeros(dim))
        self.eps = eps

    def forward(self, x):
        mean, var = welford(x)
        return (x - mean) * torch.rsqrt(var + self.eps) * self.gamma + self.beta


subject = Subject(
    kind="norm",
    name="Welford LayerNorm",
    build=lambda c: WelfordLayerNorm(c.d_model),
    forward=lambda m, x: m(x),
    declares={"norm": "layer", "norm_bias": True},
)

"""LayerNorm in two passes with a gain and no bias; the second pass works on the centred values, in place on its own copy.

Unusual: the mean is taken twice (the mean of what is left after centring is subtracted again), which removes the rounding error of
a large common offset. Division by the square root instead of rsqrt.
"""

import torch
from torch import nn

from veriformer.properties import Subject


class TwoPassLayerNorm(nn.Module):
    def __init__(self, d_model, eps=1e-5):
        super().__init__()
        self.g = nn.Parameter(torch.ones(d_model))
        self.eps = eps

    def forward(self, x):
        centred = x - x.mean(dim=-1, keepdim=True)
        centred -= centred.mean(dim=-1, keepdim=True)
        variance = (centred * centred).mean(dim=-1, keepdim=True)
        return centred / (variance + self.eps).sqrt() * self.g


COMMON = dict(kind="norm", build=lambda c: TwoPassLayerNorm(c.d_model), forward=lambda m, x: m(x))
undeclared = Subject(**COMMON)
declared = Subject(**COMMON, declares={"norm": "layer", "norm_bias": False})

"""LayerNorm written out, with gain and bias."""
import math

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


class LayerNorm(nn.Module):
    def __init__(self, d, bad, eps=1e-5):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(d)), nn.Parameter(torch.zeros(d))
        self.eps, self.bad = eps, bad

    def forward(self, x):
        mean = x.mean(-1, keepdim=True)
        if self.bad:
            var = (x * x).mean(-1, keepdim=True) - mean * mean
        else:
            var = (x - mean).square().mean(-1, keepdim=True)
        return (x - mean) * torch.rsqrt(var + self.eps) * self.weight + self.bias


def subject(bad):
    return Subject(kind="norm", build=lambda c: LayerNorm(c.d_model, bad), forward=lambda m, x: m(x),
                   declares={"norm": "layer", "norm_bias": True})


right, wrong = subject(False), subject(True)
WHAT = "The variance is the mean of squares minus the square of the mean, in one pass: for inputs with a large mean it cancels, gives wrong values or, negative, NaN."
PLACE = "variance of the LayerNorm (numerics)"

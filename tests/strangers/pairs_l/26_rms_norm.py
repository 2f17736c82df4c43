"""RMSNorm (Zhang & Sennrich 2019), by torch's own normalize."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


def rms(factor):
    class RMSNorm(nn.Module):
        def __init__(self, dim):
            super().__init__()
            self.g = nn.Parameter(torch.ones(dim))

        def forward(self, x):
            return F.normalize(x, dim=-1) * factor(x.shape[-1]) * self.g

    return RMSNorm


def subject(cls):
    return Subject(
        kind="norm",
        name="rms norm",
        build=lambda c: cls(c.d_model),
        forward=lambda m, x: m(x),
        declares={"norm": "rms"},
    )


right = subject(rms(lambda d: d**0.5))
wrong = subject(rms(lambda d: 1.0))
WHAT = "F.normalize without the factor sqrt(d): length 1 instead of a root mean square of 1"
CAUSE = (
    "It divides by the length of the vector instead of its root mean square: the factor sqrt(d) is missing, so outputs have "
    "norm 1 and a root mean square of 1/sqrt(d)."
)

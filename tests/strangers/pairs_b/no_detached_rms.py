"""RMSNorm for a trainer that is short of memory."""
import math

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


class RMSNorm(nn.Module):
    def __init__(self, d, bad, eps=1e-6):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(d))
        self.eps, self.bad = eps, bad

    def forward(self, x):
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.bad):
            r = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        return x * r * self.scale


def subject(bad):
    return Subject(kind="norm", build=lambda c: RMSNorm(c.d_model, bad), forward=lambda m, x: m(x))


right, wrong = subject(False), subject(True)
WHAT = "The root mean square is computed without gradients, so that the gradient of the norm lacks the term through the statistic; the forward is right."
PLACE = "gradient of the RMSNorm's statistic"

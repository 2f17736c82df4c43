
import torch
from torch import nn

from veriformer.properties import Subject

class Net(nn.Module):
    def __init__(self, c, bug):
        super().__init__()
        self.bug = bug
        self.gain, self.shift = nn.Parameter(torch.ones(c.d_model)), nn.Parameter(torch.zeros(c.d_model))

    def forward(self, x):
        mean = x.mean(-1, keepdim=True)
        if self.bug:
            var = ((x * x).mean(-1, keepdim=True) - mean * mean).clamp(min=0)
        else:
            var = (x - mean).pow(2).mean(-1, keepdim=True)
        return (x - mean) / torch.sqrt(var + 1e-5) * self.gain + self.shift


WHAT = 'The variance is computed in one pass as E[x^2] - E[x]^2, which cancels catastrophically when the mean is large against the spread.'
PLACE = 'variance of the LayerNorm'


def make(bug):
    return Subject(
        kind="norm",
        build=lambda c: Net(c, bug),
        forward=lambda m, x: m(x),
    )


right, wrong = make(False), make(True)

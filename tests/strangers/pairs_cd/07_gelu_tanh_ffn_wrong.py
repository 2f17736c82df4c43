WHAT = 'the constant sqrt(2 / pi) of the tanh form of GELU is written as sqrt(2) / pi (line 12: c = math.sqrt(2) / math.pi)'
"""Feed-forward block with the tanh form of GELU, spelled out."""
import math

import torch
from torch import nn

from veriformer.properties import Subject


def gelu(x):
    c = math.sqrt(2) / math.pi
    return 0.5 * x * (1.0 + torch.tanh(c * (x + 0.044715 * x**3)))


class FeedForward(nn.Module):
    def __init__(self, d_model, d_ff):
        super().__init__()
        self.W1 = nn.Parameter(torch.randn(d_model, d_ff) / math.sqrt(d_model))
        self.b1 = nn.Parameter(torch.zeros(d_ff))
        self.W2 = nn.Parameter(torch.randn(d_ff, d_model) / math.sqrt(d_ff))
        self.b2 = nn.Parameter(torch.zeros(d_model))

    def forward(self, x):
        hidden = gelu(torch.einsum("btd,df->btf", x, self.W1) + self.b1)
        return torch.einsum("btf,fd->btd", hidden, self.W2) + self.b2


subject = Subject(
    kind="feed_forward",
    name="FFN with GELU",
    build=lambda c: FeedForward(c.d_model, c.d_ff),
    forward=lambda model, x: model(x),
    declares={"activation": "gelu_tanh", "bias": True},
)

WHAT = "Activations are quantised with one scale for the whole sequence instead of one a token (line 22): a large token, even a later one or padding, changes the rounding of all others."
"""Feed-forward network with W8A8 fake quantisation: weights by output channel, activations on the fly by token."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


def fake_quant(x, dim, bits=8):
    """Symmetric, with one scale for all that lies along dim; gradients pass straight through."""
    top = 2 ** (bits - 1) - 1
    scale = x.detach().abs().amax(dim=dim, keepdim=True).clamp(min=1e-8) / top
    rounded = torch.round(x / scale).clamp(-top, top) * scale
    return x + (rounded - x).detach()


class QuantLinear(nn.Linear):
    def forward(self, x):
        weight = fake_quant(self.weight, dim=1)
        x = fake_quant(x, dim=(-2, -1))
        return F.linear(x, weight, self.bias)


class QuantFeedForward(nn.Module):
    def __init__(self, d_model, d_ff):
        super().__init__()
        self.up = QuantLinear(d_model, d_ff)
        self.down = QuantLinear(d_ff, d_model)

    def forward(self, x):
        return self.down(F.relu(self.up(x)))


subject = Subject(
    kind="feed_forward",
    name="feed-forward in 8 bits",
    build=lambda c: QuantFeedForward(c.d_model, c.d_ff),
    forward=lambda model, x: model(x),
    declares={"activation": "relu", "bias": True, "quantised": True},
)

"""The position-wise feed-forward network of GPT-2, written out for a course."""

import math

import torch
from torch import nn

from veriformer.properties import Subject


def gelu(x):
    # the approximation of Hendrycks and Gimpel with a hyperbolic tangent
    inner = math.sqrt(2.0 / math.pi) * x + 0.044715 * torch.pow(x, 3)
    return 0.5 * x * (1.0 + torch.tanh(inner))


class PositionwiseFeedForward(nn.Module):
    """Two affine maps with a GELU between them, the same at every position."""

    def __init__(self, d_model, d_ff, dropout=0.1):
        super().__init__()
        self.w_1 = nn.Linear(d_model, d_ff)
        self.w_2 = nn.Linear(d_ff, d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return self.w_2(self.dropout(gelu(self.w_1(x))))


subject = Subject(
    kind="feed_forward",
    name="course feed-forward",
    build=lambda c: PositionwiseFeedForward(c.d_model, c.d_ff, c.dropout),
    forward=lambda m, x: m(x),
    declares={"activation": "gelu_tanh", "bias": True, "structure": "textbook", "init": "default"},
)

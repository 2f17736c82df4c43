"""A feed-forward network whose matrices are weight-normed, run in chunks of positions."""
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from veriformer.properties import DrawnConfig, Subject


class ChunkedFeedForward(nn.Module):
    def __init__(self, d_model, d_ff, dropout, chunk=3):
        super().__init__()
        self.chunk = chunk
        self.expand = weight_norm(nn.Linear(d_model, d_ff), dim=0)
        self.contract = weight_norm(nn.Linear(d_ff, d_model), dim=0)
        self.drop = nn.Dropout(dropout)

    def one(self, x):
        h = self.expand(x)
        h = 0.5 * h * (1 + torch.tanh(0.7978845608028654 * (h + 0.044715 * h**3)))
        return self.drop(self.contract(h))

    def forward(self, x):
        return torch.cat([self.one(part) for part in x.split(self.chunk, dim=1)], dim=1)


def build(c: DrawnConfig):
    return ChunkedFeedForward(c.d_model, c.d_ff, c.dropout)


def forward(model, x):
    return model(x)


declared = Subject(
    kind="feed_forward", name="weight-normed feed-forward", build=build, forward=forward,
    declares={"activation": "gelu_tanh", "bias": True, "residual": False},
)
undeclared = Subject(kind="feed_forward", build=build, forward=forward)

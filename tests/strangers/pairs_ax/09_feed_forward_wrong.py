WHAT = "F.dropout is called without training=self.training, and its default is True (line 21): it drops in eval mode too."
"""The position-wise feed-forward network of a tutorial."""

import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject


class PositionwiseFeedForward(nn.Module):
    "FFN(x) = max(0, x W1 + b1) W2 + b2"

    def __init__(self, d_model, d_ff, dropout=0.1):
        super().__init__()
        self.w_1 = nn.Linear(d_model, d_ff)
        self.w_2 = nn.Linear(d_ff, d_model)
        self.p = dropout

    def forward(self, x):
        hidden = F.relu(self.w_1(x))
        hidden = F.dropout(hidden, p=self.p)
        return self.w_2(hidden)


subject = Subject(
    kind="feed_forward",
    name="position-wise feed-forward",
    build=lambda c: PositionwiseFeedForward(c.d_model, c.d_ff, c.dropout),
    forward=lambda model, x: model(x),
    declares={"activation": "relu", "bias": True},
)

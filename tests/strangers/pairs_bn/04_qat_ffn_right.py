"""Feed-forward network for int8 deployment: weights are fake-quantised per output channel while training."""

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


def fake_quant(w, bits=8):
    qmax = 2 ** (bits - 1) - 1
    step = w.abs().amax(dim=1, keepdim=True).clamp(min=1e-8) / qmax
    grid = (w / step).round().clamp(-qmax, qmax) * step
    return w + (grid - w).detach()


class QLinear(nn.Linear):
    def forward(self, x):
        return F.linear(x, fake_quant(self.weight), self.bias)


class QuantMLP(nn.Module):
    def __init__(self, d_model, d_ff):
        super().__init__()
        self.fc1 = QLinear(d_model, d_ff)
        self.fc2 = QLinear(d_ff, d_model)

    def forward(self, x):
        return self.fc2(F.relu(self.fc1(x)))


subject = Subject(
    kind="feed_forward",
    name="QAT feed-forward",
    build=lambda c: QuantMLP(c.d_model, c.d_ff),
    forward=lambda model, x: model(x),
    declares={"activation": "relu", "bias": True, "quantised": True},
)

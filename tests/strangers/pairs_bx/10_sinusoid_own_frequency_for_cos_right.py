import numpy as np
import torch
from torch import nn

from veriformer.properties import Subject


class SinusoidalPositions(nn.Module):
    def __init__(self, d_model):
        super().__init__()
        self.d_model = d_model

    def forward(self, length):
        d = self.d_model
        pos = np.arange(length)[:, None]
        table = np.zeros((length, d))
        table[:, 0::2] = np.sin(pos / np.power(10000, np.arange(0, d, 2) / d))
        table[:, 1::2] = np.cos(pos / np.power(10000, np.arange(0, d - 1, 2) / d))
        return torch.from_numpy(table).float()


subject = Subject(
    kind="positions",
    name="sinusoidal table",
    build=lambda c: SinusoidalPositions(c.d_model),
    forward=lambda m, length: m(length),
    declares={"positions": "sinusoidal", "layout": "interleaved", "base": 10000},
)

"""Sinusoidal positions as in the TensorFlow tutorial, with NumPy; sines in even channels, cosines in odd ones."""

import numpy as np
import torch
from torch import nn

from veriformer.properties import Subject


def get_angles(pos, i, d_model):
    angle_rates = 1 / np.power(10000, (2 * (i // 2)) / d_model)
    return pos * angle_rates


def positional_encoding(position, d_model):
    angle_rads = get_angles(np.arange(position)[:, np.newaxis], np.arange(d_model)[np.newaxis, :], d_model)
    # apply sin to even indices in the array; 2i
    angle_rads[:, 0::2] = np.sin(angle_rads[:, 0::2])
    # apply cos to odd indices in the array; 2i+1
    angle_rads[:, 1::2] = np.cos(angle_rads[:, 1::2])
    return torch.from_numpy(angle_rads).to(torch.float32)


class PositionalEncoding(nn.Module):
    def __init__(self, d_model, max_len):
        super().__init__()
        self.register_buffer("pe", positional_encoding(max_len, d_model), persistent=False)

    def forward(self, length):
        if length > self.pe.size(0):
            raise ValueError(f"{length} positions, the table has {self.pe.size(0)}")
        return self.pe[:length]


subject = Subject(
    kind="positions",
    name="sinusoidal table",
    build=lambda c: PositionalEncoding(c.d_model, 512),
    forward=lambda model, length: model(length),
    declares={"positions": "sinusoidal", "layout": "interleaved", "max_len": 512, "beyond_max_len": "error"},
)

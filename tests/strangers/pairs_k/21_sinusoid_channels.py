"""Sinusoidal positions in the style of a well-known tutorial."""

import torch
from torch import nn

from veriformer.properties import Subject

WHAT = "The exponent uses the channel's index itself, not 2 * (i // 2): a cosine has another frequency than its sine."
CAUSE = (
    "Sine and cosine of a pair have different frequencies: every channel i has its own, base^(-i/d), where a pair must "
    "share base^(-2(i//2)/d)."
)


def make(index):
    class PositionalEncoding(nn.Module):
        def __init__(self, d_model, max_len, base=10000.0):
            super().__init__()
            position = torch.arange(max_len, dtype=torch.float64).unsqueeze(1)
            channel = torch.arange(d_model)
            angle = position / base ** (index(channel).double() / d_model)
            table = torch.zeros(max_len, d_model, dtype=torch.float64)
            table[:, 0::2] = torch.sin(angle[:, 0::2])
            table[:, 1::2] = torch.cos(angle[:, 1::2])
            self.register_buffer("pe", table.to(torch.get_default_dtype()), persistent=False)

        def forward(self, length):
            if length > self.pe.shape[0]:
                raise ValueError(f"{length} positions asked for, but the table has {self.pe.shape[0]}")
            return self.pe[:length]

    return PositionalEncoding


def subject(index):
    encoding = make(index)
    return Subject(
        kind="positions",
        name="positional encoding",
        build=lambda c: encoding(c.d_model, c.max_len),
        forward=lambda m, length: m(length),
        declares={"positions": "sinusoidal", "layout": "interleaved", "beyond_max_len": "error"},
    )


right = subject(lambda i: 2 * (i // 2))
wrong = subject(lambda i: i)

WHAT = "The cosine takes the exponent (i + 1) / d_model of its own channel rather than that of its pair, so sine and cosine of a pair have different wavelengths (line 21)."
import math

import torch
from torch import nn

from veriformer.properties import Subject


class PositionalEncoder(nn.Module):
    """Fills the table entry by entry, as in the blog posts."""

    def __init__(self, d_model, max_seq_len=80):
        super().__init__()
        self.d_model = d_model
        pe = torch.zeros(max_seq_len, d_model)
        for pos in range(max_seq_len):
            for i in range(0, d_model, 2):
                pe[pos, i] = math.sin(pos / (10000 ** (i / d_model)))
                if i + 1 < d_model:
                    pe[pos, i + 1] = math.cos(pos / (10000 ** ((i + 1) / d_model)))
        self.register_buffer("pe", pe)

    def forward(self, length):
        if length > self.pe.size(0):
            raise ValueError(f"sequence of {length} is longer than {self.pe.size(0)}")
        return self.pe[:length]


subject = Subject(
    kind="positions",
    build=lambda c: PositionalEncoder(c.d_model, c.max_len),
    forward=lambda model, length: model(length),
    declares={"positions": "sinusoidal", "layout": "interleaved", "base": 10000},
)

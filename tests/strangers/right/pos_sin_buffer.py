"""Sinusoidal positions as in The Annotated Transformer: a buffer of 64 rows filled column by column; more rows are an error."""

import math

import torch
import torch.nn as nn

from veriformer.properties import Subject

MAX_LEN = 64


class PositionalEncoding(nn.Module):
    "Implement the PE function."

    def __init__(self, d_model, max_len=MAX_LEN):
        super().__init__()
        # Compute the positional encodings once in log space.
        pe = torch.zeros(max_len, d_model, dtype=torch.float64)
        position = torch.arange(0, max_len, dtype=torch.float64).unsqueeze(1)
        div_term = torch.exp(torch.arange(0, d_model, 2, dtype=torch.float64) * -(math.log(10000.0) / d_model))
        pe[:, 0::2] = torch.sin(position * div_term)
        pe[:, 1::2] = torch.cos(position * div_term)[:, : d_model // 2]
        self.register_buffer("pe", pe.to(torch.get_default_dtype()))

    def forward(self, length):
        if length > self.pe.size(0):
            raise ValueError(f"length {length} exceeds the {self.pe.size(0)} positions of the table")
        return self.pe[:length]


COMMON = dict(
    kind="positions",
    build=lambda c: PositionalEncoding(c.d_model),
    forward=lambda m, length: m(length),
    domain={"max_len": [MAX_LEN]},
)
undeclared = Subject(**COMMON)
declared = Subject(
    **COMMON,
    declares={"positions": "sinusoidal", "layout": "interleaved", "max_len": MAX_LEN, "beyond_max_len": "error"},
)

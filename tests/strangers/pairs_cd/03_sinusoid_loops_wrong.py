WHAT = 'the cosine of a pair takes its exponent from its own odd channel i + 1 instead of from the even channel i, so sine and cosine of a pair have different frequencies (line 20: table[pos, i + 1] = math.cos(pos / 10000 ** ((i + 1) / self.d_model)))'
"""Positional encoding from the paper, written with two loops as in the notebook."""
import math

import torch

from veriformer.properties import Subject


class PositionalEncoding:
    def __init__(self, d_model):
        self.d_model = d_model

    def __call__(self, length):
        table = torch.zeros(length, self.d_model)
        for pos in range(length):
            for i in range(0, self.d_model, 2):
                table[pos, i] = math.sin(pos / 10000 ** (i / self.d_model))
                if i + 1 < self.d_model:
                    table[pos, i + 1] = math.cos(pos / 10000 ** ((i + 1) / self.d_model))
        return table


subject = Subject(
    kind="positions",
    name="sinusoids by loops",
    build=lambda c: PositionalEncoding(c.d_model),
    forward=lambda model, length: model(length),
    declares={"positions": "sinusoidal", "layout": "interleaved"},
)

WHAT = "the cosine of a pair has the exponent (i + 1) / d instead of i / d, so that sine and cosine of a pair have different wavelengths and a shift is no rotation (line 19)."
import torch
from torch import nn

from veriformer.properties import Subject


class PositionalEncoder(nn.Module):
    def __init__(self, d_model):
        super().__init__()
        self.d_model = d_model

    def forward(self, length):
        pos = torch.arange(length, dtype=torch.float64)
        pe = torch.zeros(length, self.d_model, dtype=torch.float64)
        for i in range(0, self.d_model, 2):
            pe[:, i] = torch.sin(pos / (10000 ** (i / self.d_model)))
            if i + 1 < self.d_model:
                pe[:, i + 1] = torch.cos(pos / (10000 ** ((i + 1) / self.d_model)))
        return pe.to(torch.get_default_dtype())


subject = Subject(
    kind="positions",
    name="sinusoids, in a loop",
    build=lambda c: PositionalEncoder(c.d_model),
    forward=lambda m, length: m(length),
    declares={"positions": "sinusoidal", "layout": "interleaved", "base": 10000},
)

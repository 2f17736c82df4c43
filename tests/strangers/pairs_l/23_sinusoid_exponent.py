"""Sinusoidal positions of Vaswani et al., section 3.5."""

import torch
from torch import nn

from veriformer.properties import Subject


def table(exponents):
    class PositionalEncoding(nn.Module):
        def __init__(self, d_model):
            super().__init__()
            self.d_model = d_model

        def forward(self, length):
            pos = torch.arange(length, dtype=torch.float64)[:, None]
            angle = pos / 10000.0 ** (exponents(self.d_model).to(torch.float64) / self.d_model)
            pe = torch.zeros(length, self.d_model, dtype=torch.float64)
            pe[:, 0::2] = torch.sin(angle)
            pe[:, 1::2] = torch.cos(angle)
            return pe.to(torch.get_default_dtype())

    return PositionalEncoding


def subject(cls):
    return Subject(
        kind="positions",
        name="sinusoids",
        build=lambda c: cls(c.d_model),
        forward=lambda m, length: m(length),
        domain={"d_model": [8, 16, 32]},
        declares={"positions": "sinusoidal", "layout": "interleaved", "base": 10000},
    )


right = subject(table(lambda d: torch.arange(0, d, 2)))
wrong = subject(table(lambda d: torch.arange(d // 2)))
WHAT = "the exponent is i/d instead of 2i/d: wavelengths reach 2 pi 100, not 2 pi 10000"
CAUSE = (
    "The exponents of the wavelengths are i/d_model instead of 2i/d_model, so frequencies fall as if the base were 100 "
    "instead of 10000."
)

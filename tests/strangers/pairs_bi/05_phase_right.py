import math

import torch
from torch import nn

from veriformer.properties import Subject


class FusedSinusoids(nn.Module):
    """sin(p * w_i + phase_i) in one call: the phase makes cosines of the odd channels."""

    def __init__(self, d_model, base=10000.0):
        super().__init__()
        i = torch.arange(d_model, dtype=torch.float64)
        pair = torch.div(i, 2, rounding_mode="floor")
        self.register_buffer("rate", base ** (-2 * pair / d_model), persistent=False)
        self.register_buffer("phase", (i % 2) * math.pi / 2, persistent=False)

    def forward(self, length):
        p = torch.arange(length, dtype=torch.float64, device=self.rate.device)
        return torch.sin(torch.addcmul(self.phase.double(), p[:, None], self.rate.double()))


subject = Subject(
    kind="positions",
    name="sinusoids in one call",
    build=lambda c: FusedSinusoids(c.d_model),
    forward=lambda m, length: m(length).to(torch.get_default_dtype()),
    declares={"positions": "sinusoidal", "layout": "interleaved", "base": 10000},
)

"""Sinusoidal positions whose table grows when a longer sequence comes (ESPnet's extend_pe)."""

import math

import torch
from torch import nn

from veriformer.properties import Subject


class PositionalEncoding(nn.Module):
    def __init__(self, d_model, max_len):
        super().__init__()
        self.d_model = d_model
        self.register_buffer("pe", self.rows(torch.arange(max_len)), persistent=False)

    def rows(self, positions):
        position = positions.double()[:, None]
        div_term = torch.exp(
            torch.arange(0, self.d_model, 2, dtype=torch.float64, device=positions.device)
            * -(math.log(10000.0) / self.d_model)
        )
        pe = torch.zeros(len(positions), self.d_model, dtype=torch.float64, device=positions.device)
        pe[:, 0::2] = torch.sin(position * div_term)
        pe[:, 1::2] = torch.cos(position * div_term)[:, : self.d_model // 2]
        return pe.to(torch.get_default_dtype())

    def extend_pe(self, length):
        have = self.pe.size(0)
        if length <= have:
            return
        more = self.rows(torch.arange(have, length, device=self.pe.device))
        self.pe = torch.cat([self.pe, more.to(self.pe.dtype)], dim=0)

    def forward(self, length):
        self.extend_pe(length)
        return self.pe[:length]


subject = Subject(
    kind="positions",
    name="growing sinusoids",
    build=lambda c: PositionalEncoding(c.d_model, c.max_len),
    forward=lambda model, length: model(length),
    declares={"positions": "sinusoidal", "layout": "interleaved", "beyond_max_len": "works"},
)

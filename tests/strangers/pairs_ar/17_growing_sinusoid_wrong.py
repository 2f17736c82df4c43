WHAT = 'rows appended when the table grows are counted from 0 again (`torch.arange(length - have)`): position 4 gets the code of position 0, and which codes repeat depends on the lengths asked before'
"""Sinusoidal positions, table grown on demand (tensor2tensor's channel order: sines, then cosines)."""
import torch
from torch import nn

from veriformer.properties import Subject


def timing_signal(positions, channels):
    half = channels // 2
    inv = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = positions.to(torch.float64)[:, None] * inv
    return torch.cat([angle.sin(), angle.cos()], dim=-1)


class Timing(nn.Module):
    def __init__(self, channels, rows=4):
        super().__init__()
        if channels % 2:
            raise ValueError("channels come in pairs")
        self.channels = channels
        self.register_buffer("table", timing_signal(torch.arange(rows), channels).float(), persistent=False)

    def forward(self, length):
        have = self.table.shape[0]
        if length > have:
            more = timing_signal(torch.arange(length - have), self.channels)
            self.table = torch.cat([self.table, more.to(self.table)])
        return self.table[:length]


subject = Subject(
    kind="positions",
    name="growing sinusoids",
    build=lambda c: Timing(c.d_model),
    forward=lambda m, length: m(length),
    declares={"positions": "sinusoidal", "layout": "halves", "base": 10000, "beyond_max_len": "works"},
)

"""Sinusoidal positions by the addition theorem: sines of block starts and of offsets inside a block, no sin() per position."""
import torch
from torch import nn
from veriformer.properties import Subject

BLOCK = 8


class Sinusoid(nn.Module):
    def __init__(self, dim, base=10000.0):
        super().__init__()
        self.dim, self.base = dim, base
        self.register_buffer("anchor", torch.zeros(()), persistent=False)

    def forward(self, length):
        device = self.anchor.device
        steps = torch.arange(0, self.dim, 2, dtype=torch.float64, device=device)
        omega = self.base ** (-steps / self.dim)
        blocks = -(-length // BLOCK)
        a = torch.arange(blocks, dtype=torch.float64, device=device)[:, None, None] * BLOCK * omega
        b = torch.arange(BLOCK, dtype=torch.float64, device=device)[None, :, None] * omega
        sin = a.sin() * b.cos() + a.cos() * b.sin()
        cos = a.cos() * b.cos() + a.sin() * b.sin()
        table = torch.stack((sin, cos), dim=-1).flatten(2)  # sin, cos, sin, cos, ...
        return table.flatten(0, 1)[:length, : self.dim].to(self.anchor.dtype)


subject = Subject(
    kind="positions",
    build=lambda c: Sinusoid(c.d_model),
    forward=lambda m, length: m(length),
    declares={"positions": "sinusoidal", "layout": "interleaved"},
)

WHAT = 'Line 23: cos(a + b) has a plus where the theorem has a minus: it is cos(a - b), which is right in the first block of 8 positions alone.'

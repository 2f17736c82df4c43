"""Rotary embedding as trainers call it, below autocast."""
import torch
from torch import nn

from veriformer.properties import Subject


class Rope(nn.Module):
    def __init__(self, base=10000.0):
        super().__init__()
        self.base = base

    def tables(self, positions, width, dtype, device):
        inv = 1.0 / self.base ** (torch.arange(0, width, 2, dtype=dtype, device=device) / width)
        with torch.no_grad():
            freqs = torch.matmul(positions.to(dtype)[:, None], inv[None, :])
        emb = torch.cat([freqs, freqs], -1)
        return emb.cos(), emb.sin()

    def forward(self, x, positions):
        if x.shape[-1] % 2:
            raise ValueError("an even width, please")
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        cos, sin = self.tables(positions, x.shape[-1], wide, x.device)
        h = x.to(wide)
        a, b = h.chunk(2, -1)
        return (h * cos.to(wide) + torch.cat([-b, a], -1) * sin.to(wide)).to(x.dtype)


subject = Subject(
    kind="rotary",
    name="rope under autocast",
    build=lambda c: Rope(),
    forward=lambda m, x, positions: m(x, positions),
    declares={"layout": "halves", "base": 10000},
)

WHAT = (
    'Autocast is not switched off around the outer product of positions and frequencies: under autocast that matmul runs in bfloat16 and far positions collapse onto one another'
    ' (line 15).'
)

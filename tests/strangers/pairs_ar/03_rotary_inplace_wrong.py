WHAT = '`keep = lo` is a view and not a copy: by `hi.mul_(c).add_(keep * s)` the first half has already been rotated in place, so the second half is hi*cos + (lo*cos - hi*sin)*sin; not a rotation, norms change'
"""Rotary embedding after the CUDA kernel: one thread per pair (j, j + K/2), both written back in place."""
import torch
from torch import nn

from veriformer.properties import Subject


class RotaryKernel(nn.Module):
    def __init__(self, base=10000.0):
        super().__init__()
        self.base = base

    def forward(self, x, positions):
        width = x.shape[-1]
        if width % 2:
            raise ValueError("rotary needs an even number of channels")
        half = width // 2
        inv = self.base ** (-torch.arange(half, dtype=torch.float64, device=x.device) / half)
        angle = positions.to(torch.float64)[:, None] * inv
        c, s = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        out = x.clone()
        lo, hi = out[..., :half], out[..., half:]
        keep = lo
        lo.mul_(c).sub_(hi * s)
        hi.mul_(c).add_(keep * s)
        return out


subject = Subject(
    kind="rotary",
    name="rotary kernel",
    build=lambda c: RotaryKernel(),
    forward=lambda m, x, positions: m(x, positions),
    declares={"layout": "halves", "base": 10000},
)

WHAT = "the even channels are overwritten in place before the odd ones are computed from them (aliasing), so that it is no rotation (line 23)."
"""Rotary embedding, GPT-J pairs, written into the buffer that it was given a copy of (as the CUDA op does)."""
import torch
from torch import nn

from veriformer.properties import Subject


class RotaryInPlace(nn.Module):
    def __init__(self, head_size, base=10000):
        super().__init__()
        if head_size % 2:
            raise ValueError("rotary needs an even head size")
        exponent = torch.arange(0, head_size, 2, dtype=torch.float64) / head_size
        self.inv_freq = 1.0 / base**exponent

    def forward(self, positions, x):
        angle = torch.outer(positions.to(torch.float64), self.inv_freq.to(positions.device))
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        out = x.clone()
        even, odd = out[..., 0::2], out[..., 1::2]
        even.copy_(even * cos - odd * sin)
        odd.copy_(odd * cos + even * sin)
        return out


subject = Subject(
    kind="rotary",
    name="rotary in place",
    build=lambda c: RotaryInPlace(c.d_head),
    forward=lambda m, x, positions: m(positions, x),
    declares={"layout": "interleaved", "base": 10000.0},
)

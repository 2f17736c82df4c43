"""Rotary embedding, GPT-J pairs (2i, 2i + 1), written into one buffer."""

import torch
from torch import nn

from veriformer.properties import Subject


class Rotary(nn.Module):
    def __init__(self, head_dim, base=10000.0):
        super().__init__()
        if head_dim % 2:
            raise ValueError("rotary needs an even head width")
        self.head_dim = head_dim
        self.base = base

    def angles(self, positions, dtype):
        power = torch.arange(0, self.head_dim, 2, device=positions.device, dtype=dtype) / self.head_dim
        return positions.to(dtype)[:, None] * self.base**-power

    def forward(self, x, positions):
        theta = self.angles(positions, torch.promote_types(x.dtype, torch.float32))
        cos, sin = theta.cos().to(x.dtype), theta.sin().to(x.dtype)
        out = x.clone()
        even, odd = x[..., 0::2], x[..., 1::2]
        out[..., 0::2] = even * cos - odd * sin
        out[..., 1::2] = odd * cos + even * sin
        return out


subject = Subject(
    kind="rotary",
    name="rotary in place",
    build=lambda c: Rotary(c.d_head),
    forward=lambda m, x, positions: m(x, positions),
    declares={"layout": "interleaved", "base": 10000.0},
)

"""Rotary embedding (GPT-NeoX halves) that works in place on one copy, to save memory traffic."""
import torch
from torch import nn

from veriformer.properties import Subject


class InplaceRotary(nn.Module):
    def __init__(self, head_dim, base=10000.0):
        super().__init__()
        if head_dim % 2:
            raise ValueError("head_dim must be even")
        self.head_dim = head_dim
        self.base = base

    def angles(self, positions, like):
        exponent = torch.arange(0, self.head_dim, 2, device=like.device, dtype=torch.float64) / self.head_dim
        theta = positions.to(torch.float64)[:, None] * self.base**-exponent
        return theta.cos().to(like.dtype), theta.sin().to(like.dtype)

    def forward(self, x, positions):
        cos, sin = self.angles(positions, x)
        half = self.head_dim // 2
        out = x.clone()
        lo, hi = out[..., :half], out[..., half:]
        was = lo.clone()
        lo.mul_(cos).sub_(hi * sin)
        hi.mul_(cos).add_(was * sin)
        return out


subject = Subject(
    kind="rotary",
    name="in-place rotary",
    build=lambda c: InplaceRotary(c.d_head),
    forward=lambda m, x, positions: m(x, positions),
    declares={"positions": "rotary", "layout": "halves", "base": 10000},
)

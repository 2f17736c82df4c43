"""Rotary positions on the first channels of a head (GPT-NeoX's rotary_pct), the rest passes through."""

import torch
from torch import nn

from veriformer.properties import Subject

ROTARY_DIM = 4


def rotate_half(x):
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


class PartialRotary(nn.Module):
    def __init__(self, head_dim, rotary_dim, base=10000.0):
        super().__init__()
        if head_dim < rotary_dim:
            raise ValueError("a head is narrower than what is rotated")
        self.head_dim, self.rotary_dim, self.base = head_dim, rotary_dim, base

    def angles(self, positions):
        exponent = torch.arange(0, self.rotary_dim, 2, dtype=torch.float64, device=positions.device) / self.rotary_dim
        inv_freq = self.base**-exponent
        theta = positions.to(torch.float64)[:, None] * inv_freq
        return torch.cat((theta, theta), dim=-1)

    def forward(self, x, positions):
        theta = self.angles(positions)
        cos, sin = theta.cos().to(x.dtype), theta.sin().to(x.dtype)
        turned, passed = x[..., : self.rotary_dim], x[..., self.rotary_dim :]
        turned = turned * cos + rotate_half(turned) * sin
        return torch.cat((turned, passed), dim=-1)


subject = Subject(
    kind="rotary",
    name="partial rotary",
    build=lambda c: PartialRotary(c.d_head, ROTARY_DIM),
    forward=lambda model, x, positions: model(x, positions),
    declares={"positions": "rotary", "rotary_dim": ROTARY_DIM, "layout": "halves", "base": 10000},
)

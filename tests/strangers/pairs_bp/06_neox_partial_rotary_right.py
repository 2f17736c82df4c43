import torch
from torch import nn

from veriformer.properties import Subject

ROTARY_DIM = 4


class PartialRotary(nn.Module):
    """GPT-NeoX / Phi: the first `rotary_dim` channels of a head are rotated, the others pass."""

    def __init__(self, head_dim, rotary_dim=ROTARY_DIM, base=10000.0):
        super().__init__()
        if head_dim < rotary_dim:
            raise ValueError("a head is narrower than what is to be rotated")
        self.head_dim = head_dim
        self.rotary_dim = rotary_dim
        exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim
        self.register_buffer("inv_freq", base**-exponent, persistent=False)

    def forward(self, x, positions):
        angle = positions.to(torch.float64)[:, None] * self.inv_freq.to(torch.float64)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        a, b, rest = x.split([self.rotary_dim // 2, self.rotary_dim // 2, x.size(-1) - self.rotary_dim], dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)


subject = Subject(
    kind="rotary",
    name="partial rotary",
    build=lambda c: PartialRotary(c.d_model // c.num_heads),
    forward=lambda m, x, positions: m(x, positions),
    domain={"d_model": (16, 32), "num_heads": (1, 2)},
    declares={"rotary_dim": ROTARY_DIM, "layout": "halves", "base": 10000},
)

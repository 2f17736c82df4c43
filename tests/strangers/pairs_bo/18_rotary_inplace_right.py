import torch
from torch import nn

from veriformer.properties import Subject


class Rotary(nn.Module):
    def __init__(self, head_dim, base=10000.0):
        super().__init__()
        if head_dim % 2:
            raise ValueError("rotary needs an even width")
        self.half = head_dim // 2
        self.base = base

    def tables(self, positions, dtype):
        exponent = torch.arange(self.half, device=positions.device, dtype=torch.float64) / self.half
        angles = positions.to(torch.float64)[:, None] * self.base**-exponent
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def forward(self, x, positions):
        cos, sin = self.tables(positions, x.dtype)
        out = x.clone()
        x1, x2 = x[..., : self.half], x[..., self.half :]
        out[..., : self.half] = x1 * cos - x2 * sin
        out[..., self.half :] = x2 * cos + x1 * sin
        return out


subject = Subject(
    kind="rotary",
    name="rotary by halves",
    build=lambda c: Rotary(c.d_head),
    forward=lambda m, x, positions: m(x, positions),
    declares={"positions": "rotary", "layout": "halves", "base": 10000},
)

import torch
from torch import nn

from veriformer.properties import Subject


WHAT = (
    'Positions and rates are brought to the dtype of the input before the angles are formed, so in '
    'bfloat16 and float16 angles of later positions are rounded by whole radians (float32 and float64 are '
    'not affected).'
)
PLACE = 'precision of the rotary angles in half precision'


class Rotary(nn.Module):
    """Safe in half precision: only the finished cosines and sines are rounded."""

    def __init__(self, base=10000.0):
        super().__init__()
        self.base = base

    def forward(self, x, positions):
        half = x.size(-1) // 2
        exact = torch.promote_types(x.dtype, torch.float32)
        rates = self.base ** (-torch.arange(half, device=x.device, dtype=torch.float64) / half)
        angles = positions.to(exact)[:, None] * rates.to(exact)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Rotary2(nn.Module):
    """Safe in half precision: only the finished cosines and sines are rounded."""

    def __init__(self, base=10000.0):
        super().__init__()
        self.base = base

    def forward(self, x, positions):
        half = x.size(-1) // 2
        exact = x.dtype
        rates = self.base ** (-torch.arange(half, device=x.device, dtype=torch.float64) / half)
        angles = positions.to(exact)[:, None] * rates.to(exact)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


right = Subject(
    kind="rotary",
    build=lambda c: Rotary(),
    forward=lambda m, x, positions: m(x, positions),
    declares={"positions": "rotary", "layout": "halves", "base": 10000, "half_precision": True},
    domain={"d_model": [16, 24, 32], "num_heads": [2, 4]},
)

wrong = Subject(
    kind="rotary",
    build=lambda c: Rotary2(),
    forward=lambda m, x, positions: m(x, positions),
    declares={"positions": "rotary", "layout": "halves", "base": 10000, "half_precision": True},
    domain={"d_model": [16, 24, 32], "num_heads": [2, 4]},
)

WHAT = 'The paper counts pairs from 1 with exponent -2 (i - 1) / d; the - 1 is forgotten while i still starts at 1, so that every pair has the frequency of the next one and none turns by one radian a step (line 14).'
import torch

from veriformer.properties import Subject


class RoPE:
    """Rotary embedding as in the paper: theta_i = 10000^(-2 (i - 1) / d) for i = 1 .. d/2; channel i goes with i + d/2."""

    def __init__(self, dim, base=10000.0):
        if dim % 2:
            raise ValueError("the width of a head must be even")
        i = torch.arange(1, dim // 2 + 1, dtype=torch.float64)
        self.theta = base ** (-2 * i / dim)

    def __call__(self, x, positions):
        angle = torch.outer(positions.double(), self.theta.to(positions.device))
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


subject = Subject(
    kind="rotary",
    name="RoPE as in the paper",
    build=lambda c: RoPE(c.d_head),
    forward=lambda rope, x, positions: rope(x, positions),
    declares={"layout": "halves", "base": 10000, "positions": "rotary"},
)

WHAT = "Cosines and sines of the plain and the slowed angles are blended instead of the angles: pairs between the bands are not rotated but shrunk, by a factor that depends on the position (line 34)."

"""YaRN: rotary positions for a context `factor` times as long, interpolated by parts.

Pairs that turn many times within the old context stay, pairs that turn less than once are slowed down by `factor`,
those between are in between. (The temperature of YaRN belongs to the scores and is applied there.)
"""

import math

import torch
from torch import nn

from veriformer.properties import DrawnConfig, Subject


class YarnRotary(nn.Module):
    def __init__(self, width, old_context=8192, factor=4.0, base=10000.0, slow=1.0, fast=32.0):
        super().__init__()
        if width % 2:
            raise ValueError("pairs need an even width")
        self.width, self.factor = width, factor
        exponent = torch.arange(0, width, 2, dtype=torch.float64) / width
        frequency = base**-exponent
        turns = old_context * frequency / (2 * math.pi)
        kept = ((turns - slow) / (fast - slow)).clamp(0, 1)
        self.frequency, self.kept = frequency, kept

    def tables(self, positions):
        """Cosines and sines [T, width / 2]."""
        position = positions.to(torch.float64)[:, None]
        frequency, kept = self.frequency.to(positions.device), self.kept.to(positions.device)
        plain, slowed = position * frequency, position * frequency / self.factor
        return kept * plain.cos() + (1 - kept) * slowed.cos(), kept * plain.sin() + (1 - kept) * slowed.sin()

    def forward(self, x, positions):
        cos, sin = (table.to(x.dtype) for table in self.tables(positions))
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    def extra_repr(self):
        return f"{self.width}, factor={self.factor}"


def build(c: DrawnConfig):
    return YarnRotary(c.d_model // c.num_heads)


subject = Subject(
    kind="rotary",
    name="YaRN",
    build=build,
    forward=lambda model, x, positions: model(x, positions),
    declares={"layout": "halves", "positions": "other"},
)

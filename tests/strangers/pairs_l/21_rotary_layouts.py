"""Rotary position embedding (RoFormer), with rotate_half as in GPT-NeoX."""

import torch
from torch import nn

from veriformer.properties import Subject


def rope(spread):
    class RotaryEmbedding(nn.Module):
        def __init__(self, base=10000.0):
            super().__init__()
            self.base = base

        @staticmethod
        def rotate_half(x):
            x1, x2 = x.chunk(2, dim=-1)
            return torch.cat((-x2, x1), dim=-1)

        def forward(self, x, positions):
            dim = x.shape[-1]
            inv_freq = self.base ** (-torch.arange(0, dim, 2, dtype=torch.float64, device=x.device) / dim)
            angles = spread(torch.outer(positions.to(torch.float64), inv_freq))
            return x * angles.cos().to(x.dtype) + self.rotate_half(x) * angles.sin().to(x.dtype)

    return RotaryEmbedding


def subject(cls):
    return Subject(
        kind="rotary",
        name="rope",
        build=lambda c: cls(),
        forward=lambda m, x, positions: m(x, positions),
        declares={"layout": "halves", "base": 10000},
    )


right = subject(rope(lambda f: torch.cat((f, f), dim=-1)))
wrong = subject(rope(lambda f: f.repeat_interleave(2, dim=-1)))
WHAT = "angles are laid out for interleaved pairs (repeat_interleave), rotate_half pairs channel i with i + d/2"
CAUSE = (
    "Two layouts are mixed: the angles are repeated for interleaved pairs while the rotation pairs the halves, so the two "
    "channels of a pair turn by different angles, norms change and scores do not depend on distances alone."
)

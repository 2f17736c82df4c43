"""Rotary positions, ported from the original code (pairs of neighbours) to the layout of checkpoints of Hugging Face (halves)."""
import torch
from torch import nn

from veriformer.properties import Subject


def rotate_half(x):
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


class RotaryEmbedding(nn.Module):
    def __init__(self, dim, base=10000.0):
        super().__init__()
        if dim % 2:
            raise ValueError(f"rotary positions need an even number of channels, not {dim}")
        self.dim, self.base = dim, base

    def cos_sin(self, positions, dtype):
        inv_freq = self.base ** -(torch.arange(0, self.dim, 2, dtype=torch.float64, device=positions.device) / self.dim)
        angles = torch.einsum("t,f->tf", positions.to(torch.float64), inv_freq)
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def forward(self, x, positions):
        cos, sin = self.cos_sin(positions, x.dtype)
        return x * cos + rotate_half(x) * sin


subject = Subject(
    kind="rotary",
    name="rotary, halves",
    build=lambda c: RotaryEmbedding(c.d_model // c.num_heads),
    forward=lambda m, x, positions: m(x, positions),
    declares={"layout": "halves", "base": 10000},
)

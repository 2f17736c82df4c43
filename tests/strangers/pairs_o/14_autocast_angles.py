"""Rotary positions as a module, halves rotated against one another."""

import torch
from torch import nn

from veriformer.properties import Subject

WHAT = "The angles are a matrix product, which autocast computes in half precision."
CAUSE = (
    "Positions times inverse frequencies is written as a matmul; under autocast its operands are cast to bfloat16 or "
    "float16 although both were raised to float32 before, so positions and frequencies lose bits and the angles are off."
)


class RotaryEmbedding(nn.Module):
    """cos and sin of position * base^(-2i/dim)."""

    def __init__(self, dim: int, base: float = 10000.0):
        super().__init__()
        if dim % 2:
            raise ValueError(f"rotary positions need an even width, not {dim}")
        self.dim, self.base = dim, base

    def inverse_frequencies(self, positions, dtype):
        steps = torch.arange(0, self.dim, 2, device=positions.device, dtype=dtype)
        return 1.0 / self.base ** (steps / self.dim)

    def angles(self, positions, inv_freq):
        """`[T, K/2]`"""
        return positions[:, None] * inv_freq[None, :]

    def forward(self, x, positions):
        dtype = torch.promote_types(x.dtype, torch.float32)
        inv_freq = self.inverse_frequencies(positions, dtype)
        angles = self.angles(positions.to(dtype), inv_freq).to(dtype)
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


class MatmulRotaryEmbedding(RotaryEmbedding):
    def angles(self, positions, inv_freq):
        return (inv_freq[:, None] @ positions[None, :]).transpose(0, 1)


def rotate_half(x):
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


def apply_rotary_pos_emb(rotary, x, positions):
    cos, sin = rotary(x, positions)
    return x * cos + rotate_half(x) * sin


def subject(cls):
    return Subject(
        kind="rotary",
        name="rotary embedding",
        build=lambda c: cls(c.d_head),
        forward=apply_rotary_pos_emb,
        declares={"layout": "halves", "base": 10000},
    )


right = subject(RotaryEmbedding)
wrong = subject(MatmulRotaryEmbedding)

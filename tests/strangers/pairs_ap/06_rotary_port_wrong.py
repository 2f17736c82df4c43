WHAT = "The angles are laid out for adjacent pairs (repeat_interleave) while rotate_half pairs channel i with i + half, so that the two channels of a pair turn by different angles (line 28)."
"""Partial rotary embedding of GPT-NeoX, ported to torch from a JAX code base that rotates adjacent pairs."""
import torch
from torch import nn

from veriformer.properties import Subject

ROTARY_DIM = 4


def rotate_half(x):
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


class RotaryEmbedding(nn.Module):
    """The first ROTARY_DIM channels turn, channel i together with i + ROTARY_DIM / 2; the rest pass through."""

    def __init__(self, head_dim, base=10000.0):
        super().__init__()
        if head_dim < ROTARY_DIM:
            raise ValueError(f"a head of {head_dim} channels cannot turn {ROTARY_DIM} of them")
        self.base = base

    def tables(self, positions, like):
        exponent = torch.arange(0, ROTARY_DIM, 2, device=like.device, dtype=like.dtype) / ROTARY_DIM
        angles = torch.outer(positions.to(like.dtype), self.base**-exponent)  # [T, ROTARY_DIM / 2]
        angles = angles.repeat_interleave(2, dim=-1)
        return angles.cos(), angles.sin()

    def forward(self, x, positions):
        cos, sin = self.tables(positions, x)
        turned, passed = x[..., :ROTARY_DIM], x[..., ROTARY_DIM:]
        turned = turned * cos + rotate_half(turned) * sin
        return torch.cat((turned, passed), dim=-1)


subject = Subject(
    kind="rotary",
    name="GPT-NeoX rotary, ported",
    build=lambda c: RotaryEmbedding(c.d_head),
    forward=lambda model, x, positions: model(x, positions),
    declares={"positions": "rotary", "layout": "halves", "base": 10000.0, "rotary_dim": ROTARY_DIM},
)

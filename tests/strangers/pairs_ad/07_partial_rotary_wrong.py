WHAT = "the frequencies of the rotated part are spread over head_dim rather than rotary_dim (line 21): all but the first pair turn too fast"
"""Partial rotary embedding as in GPT-NeoX and Phi: the first `rotary_dim` channels of a head turn, the rest pass."""

import torch
from torch import nn

from veriformer.properties import Subject


def rotate_half(x):
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


class PartialRotaryEmbedding(nn.Module):
    def __init__(self, head_dim, rotary_dim, base=10000.0):
        super().__init__()
        self.head_dim = head_dim
        self.rotary_dim = rotary_dim
        channels = torch.arange(0, rotary_dim, 2, dtype=torch.float64)
        inv_freq = base ** (-channels / head_dim)
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, x, position_ids):
        angles = position_ids.to(torch.float64)[:, None] * self.inv_freq.to(torch.float64)
        angles = torch.cat((angles, angles), dim=-1)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        x_rot, x_pass = x[..., : self.rotary_dim], x[..., self.rotary_dim :]
        x_rot = x_rot * cos + rotate_half(x_rot) * sin
        return torch.cat((x_rot, x_pass), dim=-1)


subject = Subject(
    kind="rotary",
    name="PartialRotaryEmbedding",
    build=lambda c: PartialRotaryEmbedding(c.d_model // c.num_heads, rotary_dim=4),
    domain={"d_model": (16, 32), "num_heads": (1, 2)},
    forward=lambda m, x, positions: m(x, positions),
    declares={"layout": "halves", "base": 10000, "rotary_dim": 4},
)

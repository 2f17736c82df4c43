WHAT = "The exponents of the frequencies are divided by the whole head_dim instead of rotary_dim (line 23), so that a partly rotated head turns too fast and never reaches the long wavelengths."
"""Rotary positions of GPT-NeoX, extended to rotate a part of each head (partial_rotary_factor)."""

import torch
from torch import nn

from veriformer.properties import Subject

ROTARY_DIM = 4


def rotate_half(x):
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


class GPTNeoXRotary(nn.Module):
    def __init__(self, head_dim, rotary_dim=ROTARY_DIM, base=10000.0):
        super().__init__()
        if head_dim < rotary_dim:
            raise ValueError(f"{rotary_dim} channels cannot be rotated of {head_dim}")
        self.rotary_dim = rotary_dim
        exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float64) / head_dim
        self.inv_freq = base**-exponent

    def forward(self, x, positions):
        rotated, passed = x[..., : self.rotary_dim], x[..., self.rotary_dim :]
        freqs = torch.outer(positions.to(torch.float64), self.inv_freq.to(positions.device))
        emb = torch.cat((freqs, freqs), dim=-1)
        cos, sin = emb.cos().to(x.dtype), emb.sin().to(x.dtype)
        rotated = rotated * cos + rotate_half(rotated) * sin
        return torch.cat((rotated, passed), dim=-1)


subject = Subject(
    kind="rotary",
    name="partial rotary of GPT-NeoX",
    build=lambda c: GPTNeoXRotary(c.d_head),
    domain={"d_model": [16, 24], "num_heads": [1, 2]},
    forward=lambda model, x, positions: model(x, positions),
    declares={"layout": "halves", "base": 10000, "rotary_dim": ROTARY_DIM},
)

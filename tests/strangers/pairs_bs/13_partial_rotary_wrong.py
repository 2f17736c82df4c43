WHAT = 'Only rotary_dim channels of a head are rotated, but their wavelengths are spread over the whole head (`exponent = torch.arange(0, rotary_dim, 2) / head_dim`), so all channels but the first pair turn too fast.'
"""Partial rotary embedding (GPT-NeoX, Phi): the first channels of each head are rotated, the rest pass through."""

import torch
from torch import nn

from veriformer.properties import Subject

ROTARY_DIM = 4


class PartialRotaryEmbedding(nn.Module):
    def __init__(self, head_dim, rotary_dim=ROTARY_DIM, base=10000.0):
        super().__init__()
        if rotary_dim > head_dim:
            raise ValueError("more channels to rotate than there are")
        self.rotary_dim = rotary_dim
        exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float64) / head_dim
        self.register_buffer("inv_freq", base**-exponent, persistent=False)

    def forward(self, x, positions):
        angle = torch.outer(positions.to(torch.float64), self.inv_freq.to(torch.float64))
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        rot, rest = x[..., : self.rotary_dim], x[..., self.rotary_dim :]
        a, b = rot.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)


subject = Subject(
    kind="rotary",
    name="partial rotary",
    build=lambda c: PartialRotaryEmbedding(c.d_head),
    forward=lambda model, x, positions: model(x, positions),
    domain={"d_model": [16, 32], "num_heads": [1, 2]},
    declares={"positions": "rotary", "rotary_dim": ROTARY_DIM, "layout": "halves", "base": 10000},
)

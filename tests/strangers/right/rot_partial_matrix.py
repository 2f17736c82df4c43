"""Partial rotary positions (GPT-NeoX): the first 4 channels are turned, in halves, by an explicit rotation matrix per position.

Unusual: the turn is a product with a [T, 4, 4] orthogonal matrix, einsum instead of rotate_half; other channels pass through as
they are, bit for bit.
"""

import torch
from torch import einsum, nn

from veriformer.properties import Subject

ROTARY_DIM = 4


class PartialRotary(nn.Module):
    def matrices(self, positions, dtype):
        half = ROTARY_DIM // 2
        rate = 10000.0 ** -(torch.arange(half, dtype=torch.float64, device=positions.device) / half)
        angle = positions.double()[:, None] * rate
        c, s = torch.diag_embed(angle.cos()), torch.diag_embed(angle.sin())
        top = torch.cat([c, -s], dim=2)
        bottom = torch.cat([s, c], dim=2)
        return torch.cat([top, bottom], dim=1).to(dtype)  # [T, out, in]

    def forward(self, x, positions):
        turned, rest = x.tensor_split([ROTARY_DIM], dim=-1)
        turned = einsum("toi,bhti->bhto", self.matrices(positions, x.dtype), turned)
        return torch.cat([turned.to(x.dtype), rest], dim=-1)


COMMON = dict(
    kind="rotary",
    build=lambda c: PartialRotary(),
    forward=lambda m, x, positions: m(x, positions),
    domain={"d_model": [16, 32], "num_heads": [1, 2, 4]},
)
undeclared = Subject(**COMMON)
declared = Subject(
    **COMMON, declares={"positions": "rotary", "layout": "halves", "rotary_dim": ROTARY_DIM, "base": 10000.0}
)

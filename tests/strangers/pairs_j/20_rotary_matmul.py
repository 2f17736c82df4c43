"""Rotary positions as Hugging Face writes them: the angles are one product."""

import torch
from torch import nn

from veriformer.properties import Subject

WHAT = "the angles are a matrix product under autocast, so that positions are rounded to half precision there"
CAUSE = (
    "Under autocast the angles are computed by a matmul in bfloat16, so that positions are rounded to 8 bits and far "
    "neighbours are rotated alike."
)


class RotaryEmbedding(nn.Module):
    def __init__(self, dim, base=10000.0):
        super().__init__()
        if dim % 2:
            raise ValueError("channels are rotated in pairs")
        self.dim, self.base = dim, base

    def angles(self, positions):
        with torch.autocast(device_type=positions.device.type, enabled=False):
            return self.product(positions)

    def product(self, positions):
        inv_freq = 1.0 / self.base ** (torch.arange(0, self.dim, 2, device=positions.device).float() / self.dim)
        return positions[:, None].float() @ inv_freq[None, :]

    def forward(self, x, positions):
        freqs = self.angles(positions).float()
        emb = torch.cat((freqs, freqs), dim=-1)
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        first, second = wide.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
        return (wide * emb.cos() + turned * emb.sin()).to(x.dtype)


class RotaryPositions(RotaryEmbedding):
    def angles(self, positions):
        return self.product(positions)


def subject(model):
    return Subject(
        kind="rotary",
        name="rotary by a product",
        build=lambda c: model(c.d_head),
        forward=lambda m, x, positions: m(x, positions),
        declares={"layout": "halves", "base": 10000},
    )


right = subject(RotaryEmbedding)
wrong = subject(RotaryPositions)

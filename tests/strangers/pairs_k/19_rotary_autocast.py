"""Rotary positions with frequencies in a buffer, after an early LlamaRotaryEmbedding."""

import torch
from torch import nn

from veriformer.properties import Subject

WHAT = "Angles come from a matrix product, which autocast runs in bfloat16: positions beyond 256 coincide there."
CAUSE = (
    "Under autocast the angles are computed in half precision (positions times frequencies is a matmul, which autocast "
    "rounds to bfloat16), so far positions are wrong or coincide."
)


def by_broadcast(positions, inv_freq):
    return positions[:, None] * inv_freq[None, :]


def by_matmul(positions, inv_freq):
    return (inv_freq[None, :, None] @ positions[None, None, :]).transpose(1, 2)[0]


def make(angles):
    class RotaryEmbedding(nn.Module):
        def __init__(self, dim, base=10000.0):
            super().__init__()
            self.dim, self.base = dim, base

        def forward(self, x, positions):
            wide = torch.float64 if x.dtype == torch.float64 else torch.float32
            exponent = torch.arange(0, self.dim, 2, device=x.device, dtype=wide) / self.dim
            freqs = angles(positions.to(wide), self.base**-exponent)
            emb = torch.cat((freqs, freqs), dim=-1)
            cos, sin = emb.cos().to(x.dtype), emb.sin().to(x.dtype)
            x1, x2 = x[..., : self.dim // 2], x[..., self.dim // 2 :]
            return x * cos + torch.cat((-x2, x1), dim=-1) * sin

    return RotaryEmbedding


def subject(angles):
    rotary = make(angles)
    return Subject(
        kind="rotary",
        name="rotary embedding",
        build=lambda c: rotary(c.d_head),
        forward=lambda m, x, positions: m(x, positions),
        declares={"layout": "halves"},
    )


right = subject(by_broadcast)
wrong = subject(by_matmul)

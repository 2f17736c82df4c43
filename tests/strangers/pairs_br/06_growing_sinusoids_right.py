"""fairseq-like SinusoidalPositionalEmbedding: a table that grows when a longer sequence comes."""
import math

import torch
import torch.nn as nn

from veriformer.properties import Subject


class SinusoidalPositionalEmbedding(nn.Module):
    """Sines in the even channels, cosines in the odd ones."""

    def __init__(self, embedding_dim, init_size=8):
        super().__init__()
        self.embedding_dim = embedding_dim
        self.weights = self.rows(0, init_size)
        self.register_buffer("_float_tensor", torch.zeros(1), persistent=False)  # follows .to(dtype)

    def rows(self, start, end):
        position = torch.arange(start, end, dtype=torch.float64)
        half = (self.embedding_dim + 1) // 2
        rate = torch.exp(torch.arange(half, dtype=torch.float64) * (-2 * math.log(10000.0) / self.embedding_dim))
        angle = position[:, None] * rate[None, :]
        return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)[:, : self.embedding_dim]

    @torch.no_grad()
    def grow(self, size):
        have = self.weights.size(0)
        if size > have:
            # only what is missing is computed
            self.weights = torch.cat([self.weights, self.rows(have, size)])

    def forward(self, length):
        self.grow(length)
        return self.weights[:length].to(self._float_tensor).detach()


subject = Subject(
    kind="positions",
    name="growing sinusoids",
    build=lambda c: SinusoidalPositionalEmbedding(c.d_model),
    forward=lambda m, length: m(length),
    declares={"positions": "sinusoidal", "layout": "interleaved", "base": 10000},
)

WHAT = "cosines and sines are kept by the number of positions, not by the positions: a second call of the same length at other positions (decoding steps) rotates by the angles of the first (line 19)"
"""Rotary embedding (GPT-NeoX pairs), cosines and sines kept between calls: all layers of a step ask for the same ones."""
import torch
from torch import nn

from veriformer.properties import Subject


class RotaryEmbedding(nn.Module):
    def __init__(self, dim, base=10000):
        super().__init__()
        if dim % 2:
            raise ValueError(f"cannot rotate an odd number of channels: {dim}")
        self.dim, self.base = dim, base
        self._cached = None
        self._cos = self._sin = None

    def _update(self, positions):
        if self._cached is not None and len(self._cached) == len(positions):
            return
        with torch.inference_mode(False), torch.no_grad():
            exponent = torch.arange(0, self.dim, 2, dtype=torch.float64, device=positions.device) / self.dim
            angle = torch.outer(positions.to(torch.float64), self.base**-exponent)
            self._cos, self._sin = angle.cos(), angle.sin()
            self._cached = positions.clone()

    def forward(self, x, positions):
        self._update(positions)
        cos, sin = self._cos.to(x), self._sin.to(x)
        first, second = x[..., : self.dim // 2], x[..., self.dim // 2 :]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


subject = Subject(
    kind="rotary",
    name="cached rotary",
    build=lambda c: RotaryEmbedding(c.d_head),
    forward=lambda m, x, positions: m(x, positions),
    declares={"layout": "halves", "base": 10000},
)

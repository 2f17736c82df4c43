"""Rotary embedding that keeps the sines and cosines of its last call, since every layer asks for the same ones."""
import torch
from torch import nn

from veriformer.properties import Subject


class RotaryEmbedding(nn.Module):
    def __init__(self, dim, base=10000.0):
        super().__init__()
        if dim % 2:
            raise ValueError("rotary needs an even width")
        self.dim, self.base = dim, base
        self._positions = self._cos = self._sin = None

    def _update_cos_sin_tables(self, x, positions):
        if (
            self._positions is None
            or self._cos.device != x.device
            or self._cos.dtype != x.dtype
            or self._positions.shape != positions.shape
            or not torch.equal(self._positions, positions)
        ):
            self._positions = positions.clone()
            exponent = torch.arange(0, self.dim, 2, device=x.device, dtype=torch.float64) / self.dim
            freqs = torch.outer(positions.to(torch.float64), self.base**-exponent)
            emb = torch.cat((freqs, freqs), dim=-1)
            self._cos, self._sin = emb.cos().to(x.dtype), emb.sin().to(x.dtype)
        return self._cos, self._sin

    def forward(self, x, positions):
        cos, sin = self._update_cos_sin_tables(x, positions)
        x1, x2 = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-x2, x1), dim=-1) * sin


subject = Subject(
    kind="rotary",
    name="rotary with kept tables",
    build=lambda c: RotaryEmbedding(c.d_head),
    forward=lambda model, x, positions: model(x, positions),
    declares={"positions": "rotary", "layout": "halves", "base": 10000},
)

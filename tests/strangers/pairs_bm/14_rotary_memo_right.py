"""Rotary embedding with a memo of the last table (all layers of a model ask for the same one)."""
import torch

from veriformer.properties import Subject


class RotaryEmbedding(torch.nn.Module):
    def __init__(self, base=10000.0):
        super().__init__()
        self.base = base
        self._key = self._positions = self._cos = self._sin = None

    def _update_cos_sin_tables(self, x, positions):
        key = (positions.shape[0], x.shape[-1], x.dtype, x.device)
        if key != self._key or not torch.equal(positions, self._positions):
            half = x.shape[-1] // 2
            exponent = torch.arange(half, dtype=torch.float64, device=x.device) / half
            freqs = torch.outer(positions.to(torch.float64), self.base**-exponent)
            emb = torch.cat((freqs, freqs), dim=-1)
            self._cos, self._sin = emb.cos().to(x.dtype), emb.sin().to(x.dtype)
            self._key, self._positions = key, positions.clone()
        return self._cos, self._sin

    def forward(self, x, positions):
        if x.shape[-1] % 2:
            raise ValueError("an even number of channels, please")
        cos, sin = self._update_cos_sin_tables(x, positions)
        x1, x2 = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-x2, x1), dim=-1) * sin


subject = Subject(
    kind="rotary",
    name="rotary with a memo",
    build=lambda c: RotaryEmbedding(),
    forward=lambda m, x, positions: m(x, positions),
    declares={"positions": "rotary", "layout": "halves", "base": 10000.0},
)

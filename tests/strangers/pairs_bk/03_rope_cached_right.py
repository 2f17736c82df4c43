import torch
from torch import nn

from veriformer.properties import Subject


def rotate_half(x):
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


class RotaryEmbedding(nn.Module):
    def __init__(self, base=10000.0):
        super().__init__()
        self.base = base
        self._positions = None
        self._cos = None
        self._sin = None

    def _update(self, positions, dim):
        stale = (
            self._cos is None
            or self._cos.device != positions.device
            or self._cos.size(-1) != dim
            or not torch.equal(self._positions, positions)
        )
        if stale:
            exponent = torch.arange(0, dim, 2, dtype=torch.float64, device=positions.device) / dim
            freqs = positions.to(torch.float64)[:, None] * self.base ** -exponent
            angles = torch.cat((freqs, freqs), dim=-1)
            self._positions = positions.clone()
            self._cos, self._sin = angles.cos(), angles.sin()

    def forward(self, x, positions):
        if x.size(-1) % 2:
            raise ValueError("rotary needs an even width")
        self._update(positions, x.size(-1))
        work = torch.promote_types(x.dtype, torch.float32)
        cos, sin = self._cos.to(work), self._sin.to(work)
        wide = x.to(work)
        return (wide * cos + rotate_half(wide) * sin).to(x.dtype)


subject = Subject(
    kind="rotary",
    build=lambda c: RotaryEmbedding(),
    forward=lambda model, x, positions: model(x, positions),
    declares={"layout": "halves", "base": 10000},
)

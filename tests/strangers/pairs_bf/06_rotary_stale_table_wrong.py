WHAT = 'The table of cosines and sines is made anew only if the number of positions (or dtype, device) has changed, not if the positions have (line 23): other positions of the same number are rotated by the angles of the call before.'
"""RoPE, neighbouring channels are a pair. The table is kept, since every layer asks for the same one."""
import torch
from torch import nn

from veriformer.properties import Subject


class RotaryEmbedding(nn.Module):
    def __init__(self, head_dim, base=10000.0):
        super().__init__()
        if head_dim % 2:
            raise ValueError("head_dim must be even")
        self.head_dim, self.base = head_dim, base
        self._seen = None
        self._table = None

    def table(self, positions, dtype):
        stale = (
            self._seen is None
            or self._seen.shape != positions.shape
            or self._seen.device != positions.device
            or self._table[0].dtype != dtype
        )
        if stale:
            steps = torch.arange(0, self.head_dim, 2, device=positions.device, dtype=torch.float64)
            angles = positions.double()[:, None] * self.base ** (-steps / self.head_dim)
            self._seen = positions.clone()
            self._table = angles.cos().to(dtype), angles.sin().to(dtype)
        return self._table

    def forward(self, x, positions):
        cos, sin = self.table(positions, x.dtype)
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


subject = Subject(
    kind="rotary",
    name="RoPE with a kept table",
    build=lambda c: RotaryEmbedding(c.d_model // c.num_heads),
    forward=lambda m, x, positions: m(x, positions),
    declares={"layout": "interleaved", "base": 10000},
)

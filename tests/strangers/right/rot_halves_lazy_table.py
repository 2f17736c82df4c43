"""Rotary positions in halves (rotate_half) from tables of cosines and sines that grow on demand and are looked up by position.

Unusual: the tables are non-persistent buffers, made again when the dtype changes and made outside inference mode; positions that
are no indices (negative or fractional) are computed directly. The base is 500000.
"""

import torch
from torch import nn

from veriformer.properties import Subject

THETA = 500000.0


def rotate_half(x):
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


class RotaryEmbedding(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dim = dim
        self.cached_for = (0, None, None)
        self.register_buffer("cos_cached", torch.empty(0, dim), persistent=False)
        self.register_buffer("sin_cached", torch.empty(0, dim), persistent=False)

    def angles(self, positions):
        inv_freq = THETA ** -(torch.arange(0, self.dim, 2, dtype=torch.float64, device=positions.device) / self.dim)
        freqs = torch.outer(positions.to(torch.float64), inv_freq)
        return torch.cat((freqs, freqs), dim=-1)

    def _set_cos_sin_cache(self, seq_len, device, dtype):
        with torch.inference_mode(False), torch.no_grad():
            emb = self.angles(torch.arange(seq_len, device=device))
            self.cos_cached = emb.cos().to(dtype)
            self.sin_cached = emb.sin().to(dtype)
        self.cached_for = (seq_len, device, dtype)

    def forward(self, x, positions):
        whole = not positions.is_floating_point() and positions.numel() > 0
        if whole and int(positions.min()) >= 0 and int(positions.max()) < 1 << 16:
            needed = int(positions.max()) + 1
            rows, device, dtype = self.cached_for
            if rows < needed or device != x.device or dtype != x.dtype:
                self._set_cos_sin_cache(max(needed, 2 * rows, 32), x.device, x.dtype)
            cos, sin = self.cos_cached[positions], self.sin_cached[positions]
        else:
            emb = self.angles(positions)
            cos, sin = emb.cos().to(x.dtype), emb.sin().to(x.dtype)
        return x * cos + rotate_half(x) * sin


COMMON = dict(
    kind="rotary",
    build=lambda c: RotaryEmbedding(c.d_model // c.num_heads),
    forward=lambda m, x, positions: m(x, positions),
    domain={"d_model": [16, 24, 32], "num_heads": [1, 2, 4]},
)
undeclared = Subject(**COMMON)
declared = Subject(**COMMON, declares={"positions": "rotary", "layout": "halves", "base": THETA})

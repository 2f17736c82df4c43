# RoFormer's rotary embedding on interleaved pairs, written into one buffer to save a stack.
import torch
from torch import nn

from veriformer.properties import Subject


class RotaryEmbedding(nn.Module):
    def __init__(self, base=10000.0):
        super().__init__()
        self.base = base

    def angles(self, positions, dim):
        inv = self.base ** (-torch.arange(0, dim, 2, dtype=torch.float64, device=positions.device) / dim)
        return positions.to(torch.float64)[:, None] * inv

    def forward(self, x, positions):
        dim = x.shape[-1]
        if dim % 2:
            raise ValueError("rotary pairs need an even width")
        theta = self.angles(positions, dim)
        cos, sin = theta.cos().to(x.dtype), theta.sin().to(x.dtype)
        out = x.clone()
        even, odd = x[..., 0::2], x[..., 1::2]
        out[..., 0::2] = even * cos - odd * sin
        out[..., 1::2] = odd * cos + even * sin
        return out


subject = Subject(
    kind="rotary",
    name="interleaved rotary",
    build=lambda c: RotaryEmbedding(),
    forward=lambda m, x, positions: m(x, positions),
    declares={"positions": "rotary", "layout": "interleaved", "base": 10000},
)

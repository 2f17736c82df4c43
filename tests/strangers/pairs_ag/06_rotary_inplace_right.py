"""Rotary embedding, halves, in place on a copy to save memory."""
import torch

from veriformer.properties import Subject


class RotaryEmbedding(torch.nn.Module):
    def __init__(self, base=10000.0):
        super().__init__()
        self.base = base

    def cos_sin(self, positions, dim, dtype):
        inv_freq = 1.0 / self.base ** (torch.arange(0, dim, 2, dtype=torch.float64, device=positions.device) / dim)
        freqs = positions.to(torch.float64)[:, None] * inv_freq[None, :]
        return freqs.cos().to(dtype), freqs.sin().to(dtype)

    def forward(self, x, positions):
        dim = x.shape[-1]
        if dim % 2:
            raise ValueError("rotary needs an even head width")
        cos, sin = self.cos_sin(positions, dim, x.dtype)
        out = x.clone()
        x1, x2 = out[..., : dim // 2], out[..., dim // 2 :]
        t = x1 * sin
        x1.mul_(cos).sub_(x2 * sin)
        x2.mul_(cos).add_(t)
        return out


subject = Subject(
    kind="rotary",
    name="in-place rotary",
    build=lambda c: RotaryEmbedding(),
    forward=lambda m, x, positions: m(x, positions),
    declares={"layout": "halves", "base": 10000},
)

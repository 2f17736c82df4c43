"""Rotary positions, written in place into one copy of the input to save memory."""

import torch

from veriformer.properties import Subject


class InplaceRotary(torch.nn.Module):
    def __init__(self, head_dim: int, base: float = 10000.0):
        super().__init__()
        if head_dim % 2:
            raise ValueError(f"head_dim must be even, not {head_dim}")
        self.half = head_dim // 2
        self.base = base

    def cos_sin(self, positions, dtype):
        exponent = torch.arange(self.half, dtype=torch.float64, device=positions.device) / self.half
        angles = positions.to(torch.float64)[:, None] * self.base**-exponent
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def forward(self, x, positions):
        cos, sin = self.cos_sin(positions, x.dtype)
        out = x.clone()
        first, second = out[..., : self.half], out[..., self.half :]
        turned = first * sin
        first.mul_(cos).sub_(second * sin)
        second.mul_(cos).add_(turned)
        return out


subject = Subject(
    kind="rotary",
    name="in-place rotary",
    build=lambda c: InplaceRotary(c.d_head),
    forward=lambda model, x, positions: model(x, positions),
    declares={"layout": "halves", "base": 10000},
)

"""Rotary positions by complex numbers (LLaMA's freqs_cis), pairs of neighbouring channels."""
import torch
from torch import nn

from veriformer.properties import Subject


class Rotary(nn.Module):
    def __init__(self, theta=10000.0):
        super().__init__()
        self.theta = theta

    def frequencies(self, dim, device):
        index = torch.arange(dim // 2, dtype=torch.float64, device=device)
        return self.theta ** (-2.0 * index / dim)

    def forward(self, x, positions):
        dim = x.shape[-1]
        if dim % 2:
            raise ValueError("an even width is needed")
        angle = positions.to(torch.float64)[:, None] * self.frequencies(dim, x.device)
        turn = torch.polar(torch.ones_like(angle), angle)
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        pairs = torch.view_as_complex(x.to(wide).reshape(*x.shape[:-1], dim // 2, 2).contiguous())
        turned = torch.view_as_real(pairs * turn.to(pairs.dtype)).flatten(-2)
        return turned.to(x.dtype)


subject = Subject(
    kind="rotary",
    build=lambda c: Rotary(),
    forward=lambda m, x, positions: m(x, positions),
    declares={"layout": "interleaved", "base": 10000},
)

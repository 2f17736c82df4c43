WHAT = "The exponent of the frequencies is divided by the width of the head instead of by that of the rotated part (line 19)."
"""Partial rotary embedding as in Phi and GPT-J: the first rotary_dim channels of a head turn, in pairs of neighbours."""

import torch
from torch import Tensor, nn

from veriformer.properties import Subject


class PartialRotary(nn.Module):
    def __init__(self, head_dim: int, rotary_dim: int, theta: float = 10_000.0) -> None:
        super().__init__()
        if rotary_dim > head_dim:
            raise ValueError("rotary_dim exceeds head_dim")
        self.head_dim, self.rotary_dim, self.theta = head_dim, rotary_dim, theta

    def inverse_frequencies(self, device: torch.device) -> Tensor:
        channel = torch.arange(0, self.rotary_dim, 2, dtype=torch.float64, device=device)
        return self.theta ** (-channel / self.head_dim)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        turning, passing = x.split([self.rotary_dim, self.head_dim - self.rotary_dim], dim=-1)
        phase = positions.to(torch.float64)[:, None] * self.inverse_frequencies(x.device)
        cos, sin = phase.cos().to(x.dtype), phase.sin().to(x.dtype)
        even, odd = turning.unflatten(-1, (-1, 2)).unbind(-1)
        turned = torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2)
        return torch.cat([turned, passing], dim=-1)


subject = Subject(
    kind="rotary",
    name="partial rotary",
    build=lambda c: PartialRotary(c.d_head, rotary_dim=4),
    forward=lambda m, x, positions: m(x, positions),
    domain={"d_model": [16, 24, 32], "num_heads": [1, 2]},
    declares={"positions": "rotary", "rotary_dim": 4, "layout": "interleaved", "base": 10000},
)

"""Partial rotary embedding, GPT-NeoX layout (halves), after the merge of the `partial_rotary_factor` option."""
import torch
from torch import nn

from veriformer.properties import Subject


class PartialRotary(nn.Module):
    def __init__(self, head_dim, rotary_dim=4, base=10000.0):
        super().__init__()
        if head_dim < rotary_dim:
            raise ValueError("a head must be at least as wide as what is rotated of it")
        self.head_dim, self.rotary_dim, self.base = head_dim, rotary_dim, base

    def inv_freq(self, device):
        even = torch.arange(0, self.rotary_dim, 2, dtype=torch.float64, device=device)
        return self.base ** (-even / self.head_dim)

    def forward(self, x, positions):
        angles = positions.to(torch.float64)[:, None] * self.inv_freq(x.device)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        first, second = x[..., : self.rotary_dim].chunk(2, dim=-1)
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
        return torch.cat([turned, x[..., self.rotary_dim :]], dim=-1)


subject = Subject(
    kind="rotary",
    name="partial rotary",
    build=lambda c: PartialRotary(c.d_head),
    forward=lambda m, x, positions: m(x, positions),
    declares={"layout": "halves", "rotary_dim": 4, "base": 10000.0},
)

WHAT = (
    'The exponents of the frequencies are divided by the width of the head instead of the rotated width (line 17): with partial rotary every frequency but the first is too high.'
)

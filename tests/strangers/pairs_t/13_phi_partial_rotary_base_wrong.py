WHAT = "the wavelengths of the part that is rotated are spread over the whole width of the head, not over rotary_dim (line 28)"

"""Partial rotary positions as in Phi and GPT-NeoX: the first rotary_dim channels turn, the rest pass through."""

import torch
from torch import nn

from veriformer.properties import Subject

ROTARY_DIM = 4


class PartialRotary(nn.Module):
    """Pairs are (i, i + rotary_dim / 2), the angle of pair i at position p is p * base^(-2i / rotary_dim)."""

    def __init__(self, head_dim, rotary_dim=ROTARY_DIM, base=10000.0):
        super().__init__()
        if head_dim < rotary_dim:
            raise ValueError("the head is narrower than the part that is to be rotated")
        self.head_dim = head_dim
        self.rotary_dim = rotary_dim
        self.base = base
        self._cached_length = 0
        self._cached = None

    def frequencies(self, device):
        exponents = torch.arange(0, self.rotary_dim, 2, dtype=torch.float64, device=device)
        return self.base ** (-exponents / self.head_dim)

    def table(self, length, device):
        """Angles [length, rotary_dim / 2], made anew when a longer sequence comes."""
        if self._cached is None or length > self._cached_length or self._cached.device != device:
            places = torch.arange(length, dtype=torch.float64, device=device)
            self._cached = torch.outer(places, self.frequencies(device))
            self._cached_length = length
        return self._cached

    def forward(self, x, positions):
        """x [B, H, T, head_dim], positions [T] of integers."""
        length = int(positions.max()) + 1
        angle = self.table(length, x.device)[positions]
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        turned, passed = x[..., : self.rotary_dim], x[..., self.rotary_dim :]
        a, b = turned.chunk(2, dim=-1)
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
        return torch.cat((turned, passed), dim=-1)


subject = Subject(
    kind="rotary",
    name="partial rotary",
    build=lambda c: PartialRotary(c.d_model // c.num_heads),
    forward=lambda model, x, positions: model(x, positions),
    domain={"d_model": (16, 24, 32), "num_heads": (1, 2)},
    declares={"positions": "rotary", "layout": "halves", "rotary_dim": ROTARY_DIM, "base": 10000.0},
)

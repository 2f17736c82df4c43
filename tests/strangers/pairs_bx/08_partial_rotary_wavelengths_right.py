import torch
from torch import nn

from veriformer.properties import Subject

ROTARY = 8


class PartialRotary(nn.Module):
    """The first `rotary_dim` channels of a head are rotated (GPT-NeoX), the others pass."""

    def __init__(self, head_dim, rotary_dim=ROTARY, base=10000.0):
        super().__init__()
        assert rotary_dim % 2 == 0 and rotary_dim <= head_dim
        self.rotary_dim = rotary_dim
        steps = torch.arange(0, rotary_dim, 2, dtype=torch.float64)
        self.register_buffer("inv_freq", base ** -(steps / rotary_dim), persistent=False)

    @staticmethod
    def rotate_half(x):
        a, b = x.chunk(2, dim=-1)
        return torch.cat((-b, a), dim=-1)

    def forward(self, x, positions):
        angles = positions.to(self.inv_freq)[:, None] * self.inv_freq[None, :]
        angles = torch.cat((angles, angles), dim=-1)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        turned, passed = x[..., : self.rotary_dim], x[..., self.rotary_dim :]
        return torch.cat((turned * cos + self.rotate_half(turned) * sin, passed), dim=-1)


subject = Subject(
    kind="rotary",
    name="NeoX rotary of a part",
    build=lambda c: PartialRotary(c.d_model // c.num_heads),
    forward=lambda m, x, positions: m(x, positions),
    domain={"d_model": (32,), "num_heads": (2,)},
    declares={"positions": "rotary", "rotary_dim": ROTARY, "layout": "halves", "base": 10000},
)

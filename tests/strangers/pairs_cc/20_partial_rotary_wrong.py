WHAT = 'the exponents of the frequencies are counted in the width of the head instead of the rotated width (line 22), so that partial rotary turns too fast in all pairs but the first'
import torch
from torch import nn

from veriformer.properties import Subject


def rotate_half(x):
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


class NeoXRotary(nn.Module):
    def __init__(self, rotary_ndims=4, base=10000.0):
        super().__init__()
        self.rotary_ndims, self.base = rotary_ndims, base

    def forward(self, x, positions):
        if x.shape[-1] < self.rotary_ndims:
            raise ValueError("the head is narrower than what is rotated")
        rot, passed = x[..., : self.rotary_ndims], x[..., self.rotary_ndims :]
        width = x.shape[-1]
        exponent = torch.arange(0, self.rotary_ndims, 2, dtype=torch.float64, device=x.device) / width
        freqs = torch.outer(positions.to(torch.float64), self.base**-exponent)
        angles = torch.cat((freqs, freqs), dim=-1)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        return torch.cat((rot * cos + rotate_half(rot) * sin, passed), dim=-1)


subject = Subject(
    kind="rotary",
    name="partial rotary",
    build=lambda c: NeoXRotary(),
    forward=lambda m, x, positions: m(x, positions),
    declares={"positions": "rotary", "rotary_dim": 4, "layout": "halves", "base": 10000.0},
)

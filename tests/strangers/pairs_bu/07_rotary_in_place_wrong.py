WHAT = 'the rotation is done in place and the second half of each pair is made of the first one as it is after its own update: `first` is an alias, not a copy (line 21)'
import torch
from torch import nn

from veriformer.properties import Subject


class RotaryInPlace(nn.Module):
    def __init__(self, d_head, base=10000):
        super().__init__()
        if d_head % 2:
            raise ValueError("rotary positions need an even width")
        exponent = torch.arange(0, d_head, 2, dtype=torch.float64) / d_head
        self.inv_freq = base ** -exponent

    def forward(self, x, positions):
        angles = torch.outer(positions.double(), self.inv_freq)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        out = x.clone()
        even, odd = out[..., 0::2], out[..., 1::2]
        first = even
        even.mul_(cos).sub_(odd * sin)
        odd.mul_(cos).add_(first * sin)
        return out


subject = Subject(
    kind="rotary",
    build=lambda c: RotaryInPlace(c.d_head),
    forward=lambda m, x, positions: m(x, positions),
    declares={"positions": "rotary", "layout": "interleaved"},
)

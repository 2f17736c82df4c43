WHAT = 'Pairs are interleaved (2i, 2i+1) but the angles are laid out for halves (`torch.cat((freqs, freqs), -1)` for repeat_interleave), so that the two channels of a pair turn by different angles.'
import torch
from torch import nn

from veriformer.properties import Subject


def rotate_every_two(x):
    x1, x2 = x[..., ::2], x[..., 1::2]
    return torch.stack((-x2, x1), dim=-1).flatten(-2)


class Rotary(nn.Module):
    def __init__(self, dim, base=10000):
        super().__init__()
        if dim % 2:
            raise ValueError("rotary positions need an even number of channels")
        self.register_buffer("inv_freq", base ** (-torch.arange(0, dim, 2).double() / dim), persistent=False)

    def forward(self, x, positions):
        freqs = positions.to(torch.float64)[:, None] * self.inv_freq.double()[None, :]
        angles = torch.cat((freqs, freqs), dim=-1)
        return x * angles.cos().to(x.dtype) + rotate_every_two(x) * angles.sin().to(x.dtype)


subject = Subject(
    kind="rotary",
    name="GPT-J rotary",
    build=lambda c: Rotary(c.d_model // c.num_heads),
    forward=lambda m, x, positions: m(x, positions),
    declares={"positions": "rotary", "layout": "interleaved", "base": 10000},
)

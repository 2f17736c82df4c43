WHAT = "the frequencies of a partial rotary embedding are spread over the width of the head, not over the rotary_dim channels that are turned, so the rotated channels turn too fast and never reach the low frequencies (line 23: inv_freq = 1.0 / (base ** (torch.arange(0, rotary_ndims, 2).float() / head_size)))"
import torch
import torch.nn as nn

from veriformer.properties import Subject


ROTARY_DIM = 8


def rotate_half(x):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


class PartialRotary(nn.Module):
    """GPT-NeoX: the first `rotary_ndims` channels of each head are rotated, the others pass."""

    def __init__(self, head_size, rotary_ndims=ROTARY_DIM, base=10000):
        super().__init__()
        self.rotary_ndims = rotary_ndims
        self.head_size = head_size
        inv_freq = 1.0 / (base ** (torch.arange(0, rotary_ndims, 2).float() / head_size))
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, x, positions):
        freqs = torch.outer(positions.to(self.inv_freq), self.inv_freq)
        emb = torch.cat((freqs, freqs), dim=-1)
        cos, sin = emb.cos().to(x.dtype), emb.sin().to(x.dtype)
        rot, rest = x[..., : self.rotary_ndims], x[..., self.rotary_ndims :]
        return torch.cat((rot * cos + rotate_half(rot) * sin, rest), dim=-1)


subject = Subject(
    kind="rotary",
    build=lambda c: PartialRotary(c.d_head),
    forward=lambda m, x, positions: m(x, positions),
    declares={"positions": "rotary", "layout": "halves", "rotary_dim": ROTARY_DIM, "base": 10000},
    domain={"d_model": (32, 64), "num_heads": (1, 2)},
)

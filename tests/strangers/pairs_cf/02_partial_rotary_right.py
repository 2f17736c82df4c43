import torch
from torch import nn

from veriformer.properties import Subject


def rotate_every_two(x):
    x1, x2 = x[..., ::2], x[..., 1::2]
    return torch.stack((-x2, x1), dim=-1).flatten(-2)


class PartialRotary(nn.Module):
    # GPT-J / CodeGen: only the first rotary_dim channels turn
    def __init__(self, dim, rotary_dim):
        super().__init__()
        if dim < rotary_dim:
            raise ValueError("head narrower than its rotary part")
        self.rotary_dim = rotary_dim
        inv_freq = 1.0 / 10000 ** (torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, x, positions):
        angles = positions.to(torch.float64)[:, None] * self.inv_freq.to(torch.float64)
        sin = angles.sin().repeat_interleave(2, dim=-1).to(x.dtype)
        cos = angles.cos().repeat_interleave(2, dim=-1).to(x.dtype)
        turned, rest = x[..., : self.rotary_dim], x[..., self.rotary_dim :]
        turned = turned * cos + rotate_every_two(turned) * sin
        return torch.cat((turned, rest), dim=-1)


subject = Subject(
    kind="rotary",
    name="CodeGen rotary",
    build=lambda c: PartialRotary(c.d_head, 4),
    forward=lambda m, x, positions: m(x, positions),
    domain={"d_model": (16, 32), "num_heads": (2,)},
    declares={"layout": "interleaved", "rotary_dim": 4, "base": 10000},
)

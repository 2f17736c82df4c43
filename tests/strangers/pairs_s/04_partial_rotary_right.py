"""Partial rotary embedding, pairs side by side as in GPT-J: the first `rotary_dim` channels turn, the rest pass."""

import torch

from veriformer.properties import Subject


class PartialRotary(torch.nn.Module):
    def __init__(self, head_dim, rotary_dim, base=10_000.0):
        super().__init__()
        if head_dim < rotary_dim:
            raise ValueError(f"heads of {head_dim} channels cannot turn {rotary_dim}")
        self.head_dim, self.rotary_dim, self.base = head_dim, rotary_dim, base

    def angles(self, positions):
        exponents = torch.arange(0, self.rotary_dim, 2, dtype=torch.float64, device=positions.device)
        inv_freq = self.base ** -(exponents / self.rotary_dim)
        return torch.einsum("t,f->tf", positions.double(), inv_freq)

    def forward(self, x, positions):
        angle = self.angles(positions)
        cos = angle.cos().repeat_interleave(2, -1).to(x.dtype)
        sin = angle.sin().repeat_interleave(2, -1).to(x.dtype)
        turning, passing = x.tensor_split([self.rotary_dim], dim=-1)
        quarter = torch.stack([-turning[..., 1::2], turning[..., 0::2]], -1).flatten(-2)
        return torch.cat([turning * cos + quarter * sin, passing], -1)


subject = Subject(
    kind="rotary",
    name="partial rotary",
    build=lambda c: PartialRotary(c.d_model // c.num_heads, rotary_dim=4),
    forward=lambda model, x, positions: model(x, positions),
    domain={"d_model": (24, 32, 64), "num_heads": (1, 2, 4)},
    declares={"positions": "rotary", "rotary_dim": 4, "layout": "interleaved", "base": 10000.0},
)

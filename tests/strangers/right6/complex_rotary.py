"""Rotary positions by complex numbers, channel i with channel i + K/2, angles in double precision."""
import torch
from torch import nn

from veriformer.properties import DrawnConfig, Subject


class ComplexRotary(nn.Module):
    def __init__(self, width, base):
        super().__init__()
        if width % 2:
            raise ValueError("an odd width cannot be rotated in pairs")
        self.base = base

    def forward(self, x, positions):
        width = x.shape[-1]
        real = torch.float64 if x.dtype == torch.float64 else torch.float32
        rate = torch.pow(self.base, -torch.arange(0, width, 2, dtype=torch.float64, device=x.device) / width)
        angle = torch.outer(positions.double(), rate)
        turn = torch.complex(angle.cos().to(real), angle.sin().to(real))
        first, second = x.to(real).tensor_split(2, dim=-1)
        z = torch.complex(first, second) * turn
        return torch.cat((z.real, z.imag), -1).to(x.dtype)


def build(c: DrawnConfig):
    return ComplexRotary(c.d_model // c.num_heads, 500.0)


def forward(model, x, positions):
    return model(x, positions)


declared = Subject(
    kind="rotary", name="complex rotary", build=build, forward=forward,
    declares={"layout": "halves", "base": 500.0, "positions": "rotary"},
)
undeclared = Subject(kind="rotary", build=build, forward=forward)

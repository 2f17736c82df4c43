"""Rotary embedding (halves) as an autograd Function which keeps no activations: the backward is the rotation back."""
import torch
from torch import nn
from veriformer.properties import Subject


def turn(x, cos, sin):
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)


class Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return turn(x, cos, sin)

    @staticmethod
    def backward(ctx, grad):
        cos, sin = ctx.saved_tensors
        return Rotate.apply(grad, cos, sin), None, None


class Rotary(nn.Module):
    def __init__(self, head_dim, base=10000.0):
        super().__init__()
        if head_dim % 2:
            raise ValueError("rotary needs an even head_dim")
        self.head_dim, self.base = head_dim, base

    def forward(self, x, positions):
        exponent = torch.arange(0, self.head_dim, 2, dtype=torch.float64, device=x.device) / self.head_dim
        angles = positions.to(torch.float64)[:, None] * self.base**-exponent
        return Rotate.apply(x, angles.cos().to(x.dtype), angles.sin().to(x.dtype))


subject = Subject(
    kind="rotary",
    build=lambda c: Rotary(c.d_model // c.num_heads),
    forward=lambda m, x, positions: m(x, positions),
    declares={"layout": "halves", "base": 10000},
)

WHAT = 'Line 21: the backward turns the gradient forward once more rather than back (sin is not negated); outputs are right, gradients are not.'

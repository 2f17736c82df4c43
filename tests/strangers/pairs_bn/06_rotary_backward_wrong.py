WHAT = 'the hand-written backward rotates the gradient by +angle as the forward does, where the transpose of a rotation is the rotation by -angle: sin is not negated (line 24)'
"""Fused rotary embedding with a backward of its own."""

import torch
from torch import nn

from veriformer.properties import Subject


class FusedRope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        half = x.shape[-1] // 2
        out = torch.empty_like(x)
        first, second = x[..., :half], x[..., half:]
        out[..., :half] = first * cos - second * sin
        out[..., half:] = second * cos + first * sin
        return out

    @staticmethod
    def backward(ctx, grad):
        cos, sin = ctx.saved_tensors
        return FusedRope.apply(grad, cos, sin), None, None


class Rope(nn.Module):
    def __init__(self, head_dim, base=10000.0):
        super().__init__()
        if head_dim % 2:
            raise ValueError("head_dim must be even")
        self.head_dim, self.base = head_dim, base

    def forward(self, x, positions):
        pairs = torch.arange(0, self.head_dim, 2, dtype=torch.float64, device=x.device)
        angles = torch.outer(positions.to(torch.float64), self.base ** (-pairs / self.head_dim))
        compute = torch.promote_types(x.dtype, torch.float32)
        return FusedRope.apply(x.to(compute), angles.cos().to(compute), angles.sin().to(compute)).to(x.dtype)


subject = Subject(
    kind="rotary",
    name="fused rope",
    build=lambda c: Rope(c.d_model // c.num_heads),
    forward=lambda model, x, positions: model(x, positions),
    declares={"positions": "rotary", "layout": "halves", "base": 10000.0},
)

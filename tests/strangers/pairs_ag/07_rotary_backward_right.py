"""Fused rotary embedding with its own backward (interleaved pairs, base 500000): only the angles are kept, not x."""
import torch

from veriformer.properties import Subject


def _rope_kernel(x, cos, sin):
    even, odd = x[..., 0::2], x[..., 1::2]
    y = torch.empty_like(x)
    y[..., 0::2] = even * cos - odd * sin
    y[..., 1::2] = odd * cos + even * sin
    return y


class FusedRope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return _rope_kernel(x, cos, sin)

    @staticmethod
    def backward(ctx, dy):
        cos, sin = ctx.saved_tensors
        return FusedRope.apply(dy, cos, -sin), None, None


def fused_apply_rotary_pos_emb(model, x, positions):
    d = x.shape[-1]
    if d % 2:
        raise ValueError("head width must be even")
    theta = 500000.0 ** -(torch.arange(0, d, 2, device=x.device, dtype=torch.float64) / d)
    angle = torch.outer(positions.double(), theta)
    return FusedRope.apply(x, angle.cos().to(x.dtype), angle.sin().to(x.dtype))


subject = Subject(
    kind="rotary",
    name="fused rope",
    forward=fused_apply_rotary_pos_emb,
    declares={"layout": "interleaved", "base": 500000},
)

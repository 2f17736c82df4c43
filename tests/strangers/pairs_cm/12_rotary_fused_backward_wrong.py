"""Rotary embedding as one fused autograd function: forward and backward share the kernel, nothing of x is saved."""
import torch
from torch.autograd import Function

from veriformer.properties import Subject

BASE = 10000.0


def kernel(x, cos, sin):
    even, odd = x[..., 0::2], x[..., 1::2]
    out = torch.empty_like(x)
    out[..., 0::2] = even * cos - odd * sin
    out[..., 1::2] = even * sin + odd * cos
    return out


class FusedRotary(Function):
    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return kernel(x, cos, sin)

    @staticmethod
    def backward(ctx, grad):
        cos, sin = ctx.saved_tensors
        return FusedRotary.apply(grad, cos, sin), None, None


def apply_rotary(x, positions):
    width = x.shape[-1]
    if width % 2:
        raise ValueError("an even number of channels is rotated")
    inverse = BASE ** (-torch.arange(0, width, 2, dtype=torch.float64, device=x.device) / width)
    angle = positions.to(torch.float64)[:, None] * inverse
    wide = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
    return FusedRotary.apply(x.to(wide), angle.cos().to(wide), angle.sin().to(wide)).to(x.dtype)


subject = Subject(
    kind="rotary",
    forward=lambda model, x, positions: apply_rotary(x, positions),
    declares={"layout": "interleaved", "base": BASE},
)

WHAT = "The backward applies the forward's rotation to the gradient again instead of its inverse (the sine is not negated) (line 27)."

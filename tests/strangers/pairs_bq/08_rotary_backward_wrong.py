WHAT = 'ApplyRotary.backward turns the gradient by the angle of the forward (sin) in place of back by it (-sin): the transposed rotation is missing, so norms are right and directions wrong at every position but 0 (line 27).'
import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from veriformer.properties import Subject


def _rotate(x, cos, sin):
    half = x.shape[-1] // 2
    out = torch.empty_like(x)
    torch.mul(x[..., :half], cos, out=out[..., :half]).addcmul_(x[..., half:], sin, value=-1)
    torch.mul(x[..., half:], cos, out=out[..., half:]).addcmul_(x[..., :half], sin)
    return out


class ApplyRotary(Function):
    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, sin), None, None


def rotary(model, x, positions, base=10000.0):
    K = x.shape[-1]
    if K % 2:
        raise ValueError("rotary needs an even width")
    inverse = base ** (-torch.arange(0, K, 2, device=x.device, dtype=torch.float64) / K)
    angles = positions.to(torch.float64)[:, None] * inverse
    return ApplyRotary.apply(x, angles.cos().to(x.dtype), angles.sin().to(x.dtype))


subject = Subject(
    kind="rotary",
    name="fused rotary",
    forward=rotary,
    declares={"positions": "rotary", "layout": "halves", "base": 10000.0, "once_differentiable": True},
)

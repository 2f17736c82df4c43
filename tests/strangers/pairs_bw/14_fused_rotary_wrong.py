WHAT = "backward of FusedRotary rotates the gradient forward by the same angle (sin in place of -sin) where the transpose of a rotation is the rotation back"
import torch
from torch import nn
from torch.autograd.function import once_differentiable
from veriformer.properties import Subject


def turn(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class FusedRotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return turn(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        cos, sin = ctx.saved_tensors
        return turn(grad, cos, sin), None, None


class Rotary(nn.Module):
    def __init__(self, dim, base=10000.0):
        super().__init__()
        if dim % 2:
            raise ValueError("the width of a head must be even")
        self.dim, self.base = dim, base

    def forward(self, x, positions):
        rate = self.base ** (-torch.arange(0, self.dim, 2, device=x.device, dtype=torch.float64) / self.dim)
        angle = positions.double()[:, None] * rate
        return FusedRotary.apply(x, angle.cos().to(x.dtype), angle.sin().to(x.dtype))


subject = Subject(kind="rotary", build=lambda c: Rotary(c.d_model // c.num_heads), forward=lambda m, x, positions: m(x, positions),
                  declares={"layout": "halves", "base": 10000.0, "once_differentiable": True})

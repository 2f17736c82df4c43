"""RMSNorm with a backward that recomputes from x and 1/rms."""
import torch
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from veriformer.properties import Subject


class _RMS(Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        h = x.to(wide)
        r = torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, r)
        return (h * r * weight.to(wide)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight, r = ctx.saved_tensors
        dy, xhat = dy.to(r.dtype), x.to(r.dtype) * r
        wdy = dy * weight.to(r.dtype)
        c1 = (xhat * wdy).mean(-1, keepdim=True)
        dx = (wdy - xhat * c1) * r
        dw = (dy * xhat).flatten(0, -2).sum(0)
        return dx.to(x.dtype), dw.to(weight.dtype), None


class RMSNorm(nn.Module):
    def __init__(self, width, eps=1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x):
        return _RMS.apply(x, self.weight, self.eps)


subject = Subject(
    kind="norm",
    name="rms with backward",
    build=lambda c: RMSNorm(c.d_model),
    forward=lambda m, x: m(x),
    declares={"norm": "rms", "once_differentiable": True},
)

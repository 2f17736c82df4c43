WHAT = "the projection in the backward takes dy without the weight, right only while all weights are equal to 1 (line 23)"
# RMSNorm with a fused backward (one pass over the row, nothing recomputed but x * rstd)
import torch
from torch import nn
from torch.autograd.function import once_differentiable

from veriformer.properties import Subject


class RMSNormFn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, rstd)
        return x * rstd * weight

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight, rstd = ctx.saved_tensors
        xhat = x * rstd
        wdy = dy * weight
        c1 = (xhat * dy).mean(-1, keepdim=True)
        dx = (wdy - xhat * c1) * rstd
        dw = (dy * xhat).flatten(0, -2).sum(0)
        return dx, dw, None


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x):
        return RMSNormFn.apply(x, self.weight, self.eps)


subject = Subject(
    kind="norm",
    name="fused RMSNorm",
    build=lambda c: RMSNorm(c.d_model),
    forward=lambda m, x: m(x),
    declares={"norm": "rms", "norm_bias": False, "once_differentiable": True},
)

WHAT = "The projection in the hand-written backward of RMSNorm takes dy where it needs dy times the gain; equal only while the gain is all ones, line 28."
"""RMSNorm with a backward of its own (saves the normalised input and one number a row)."""

import torch
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from veriformer.properties import Subject


class FusedRMSNormFunction(Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        wide = x if x.dtype == torch.float64 else x.float()
        rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        x_hat = wide * rstd
        ctx.save_for_backward(x_hat, weight, rstd)
        ctx.input_dtype = x.dtype
        return (x_hat * weight).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x_hat, weight, rstd = ctx.saved_tensors
        dy = dy.to(x_hat.dtype)
        wdy = dy * weight
        c1 = (dy * x_hat).mean(-1, keepdim=True)
        dx = (wdy - x_hat * c1) * rstd
        dw = (dy * x_hat).flatten(0, -2).sum(0)
        return dx.to(ctx.input_dtype), dw.to(weight.dtype), None


class FusedRMSNorm(nn.Module):
    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, x):
        return FusedRMSNormFunction.apply(x, self.weight, self.eps)


subject = Subject(
    kind="norm",
    name="fused RMSNorm",
    build=lambda c: FusedRMSNorm(c.d_model),
    forward=lambda m, x: m(x),
    declares={"norm": "rms", "norm_bias": False, "once_differentiable": True},
)

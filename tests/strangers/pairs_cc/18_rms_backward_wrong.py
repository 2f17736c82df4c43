WHAT = 'in the hand-written backward the projection onto the normalised input is taken of the incoming gradient without the gain (line 22), so that the gradient of the input is wrong as soon as the gain is not constant 1'
import torch
from torch import nn
from torch.autograd.function import once_differentiable

from veriformer.properties import Subject


class FusedRMSNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        rstd = torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, rstd)
        return x * rstd * weight

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight, rstd = ctx.saved_tensors
        x_hat = x * rstd
        dx_hat = dy * weight
        dx = rstd * (dx_hat - x_hat * (dy * x_hat).mean(dim=-1, keepdim=True))
        dweight = (dy * x_hat).flatten(0, -2).sum(0)
        return dx, dweight, None


class FusedRMSNorm(nn.Module):
    def __init__(self, width, eps=1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x):
        return FusedRMSNormFunction.apply(x, self.weight, self.eps)


subject = Subject(
    kind="norm",
    name="fused rms norm",
    build=lambda c: FusedRMSNorm(c.d_model),
    forward=lambda m, x: m(x),
    declares={"norm": "rms", "norm_bias": False, "once_differentiable": True},
)

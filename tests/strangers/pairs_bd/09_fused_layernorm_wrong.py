WHAT = "the backward subtracts the mean of dy instead of the mean of weight * dy: the gradient of x is right at initialisation (gain 1) and wrong as soon as gains differ (line 29)"
"""LayerNorm with a backward of its own: saves x, mean and rstd, as the fused kernels do."""

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from veriformer.properties import Subject


class LayerNormFn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, eps):
        wide = x if x.dtype == torch.float64 else x.float()
        mean = wide.mean(-1, keepdim=True)
        centred = wide - mean
        rstd = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        return (centred * rstd * weight.to(wide.dtype) + bias.to(wide.dtype)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight, bias, mean, rstd = ctx.saved_tensors
        dy = dy.to(mean.dtype)
        xhat = (x.to(mean.dtype) - mean) * rstd
        wdy = dy * weight.to(mean.dtype)
        c1 = (xhat * wdy).mean(-1, keepdim=True)
        c2 = dy.mean(-1, keepdim=True)
        dx = (wdy - c2 - xhat * c1) * rstd
        dw = (dy * xhat).flatten(0, -2).sum(0)
        db = dy.flatten(0, -2).sum(0)
        return dx.to(x.dtype), dw.to(weight.dtype), db.to(bias.dtype), None


class FusedLayerNorm(nn.Module):
    def __init__(self, dim, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim))
        self.eps = eps

    def forward(self, x):
        return LayerNormFn.apply(x, self.weight, self.bias, self.eps)


subject = Subject(
    kind="norm",
    name="fused LayerNorm",
    build=lambda c: FusedLayerNorm(c.d_model),
    forward=lambda model, x: model(x),
    declares={"norm": "layer", "norm_bias": True, "once_differentiable": True},
)

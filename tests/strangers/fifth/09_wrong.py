"""LayerNorm with a backward of its own, the reference for a fused kernel: mean and 1/std are kept, x_hat is made again."""

import torch
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from veriformer.properties import Subject


class _LayerNorm(Function):
    @staticmethod
    def forward(ctx, x, weight, bias, eps):
        acc = torch.promote_types(x.dtype, torch.float32)
        wide = x.to(acc)
        mean = wide.mean(-1, keepdim=True)
        rstd = torch.rsqrt((wide - mean).square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, mean, rstd)
        y = (wide - mean) * rstd * weight.to(acc) + bias.to(acc)
        return y.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight, mean, rstd = ctx.saved_tensors
        acc = rstd.dtype
        dy = dy.to(acc)
        xhat = (x.to(acc) - mean) * rstd
        wdy = dy * weight.to(acc)
        c1 = (xhat * dy).mean(-1, keepdim=True)
        c2 = wdy.mean(-1, keepdim=True)
        dx = (wdy - c2 - xhat * c1) * rstd
        width = x.shape[-1]
        dw = (dy * xhat).reshape(-1, width).sum(0)
        db = dy.reshape(-1, width).sum(0)
        return dx.to(x.dtype), dw.to(weight.dtype), db.to(weight.dtype), None


class FusedLayerNorm(nn.Module):
    def __init__(self, width, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.eps = eps

    def forward(self, x):
        return _LayerNorm.apply(x, self.weight, self.bias, self.eps)


subject = Subject(
    kind="norm",
    name="FusedLayerNorm",
    build=lambda c: FusedLayerNorm(c.d_model),
    forward=lambda m, x: m(x),
    declares={"norm": "layer", "norm_bias": True, "once_differentiable": True, "half_precision": True},
)

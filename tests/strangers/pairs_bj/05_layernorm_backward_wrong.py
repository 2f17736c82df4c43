WHAT = "In the fused LayerNorm's backward the projection on xhat uses dy instead of weight * dy (c1, line 27), so dx is wrong as soon as the gain is not one."
"""LayerNorm as one fused op: statistics are kept, the backward is two reductions over the row."""

import torch
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from veriformer.properties import Subject


class LayerNormFn(Function):
    @staticmethod
    def forward(ctx, x, weight, bias, eps):
        mean = x.mean(-1, keepdim=True)
        centred = x - mean
        rstd = torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, mean, rstd)
        return centred * rstd * weight + bias

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight, mean, rstd = ctx.saved_tensors
        xhat = (x - mean) * rstd
        wdy = dy * weight
        c1 = (xhat * dy).mean(-1, keepdim=True)
        c2 = wdy.mean(-1, keepdim=True)
        dx = (wdy - xhat * c1 - c2) * rstd
        lead = tuple(range(dy.dim() - 1))
        return dx, (dy * xhat).sum(lead), dy.sum(lead), None


class FusedLayerNorm(nn.Module):
    def __init__(self, width, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.eps = eps

    def forward(self, x):
        return LayerNormFn.apply(x, self.weight, self.bias, self.eps)


subject = Subject(
    kind="norm",
    name="fused LayerNorm",
    build=lambda c: FusedLayerNorm(c.d_model),
    forward=lambda m, x: m(x),
    declares={"norm": "layer", "once_differentiable": True},
)

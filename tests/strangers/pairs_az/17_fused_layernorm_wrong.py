WHAT = "the backward's projection on the normalised input leaves out the gain: the gradient of x is right only while all gains are 1 (line 30)."
"""LayerNorm with a backward written by hand: saves normalised inputs and reciprocal deviations."""

import torch
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from veriformer.properties import Subject


class FusedLayerNormFunction(Function):
    @staticmethod
    def forward(ctx, x, weight, bias, eps):
        mean = x.mean(-1, keepdim=True)
        centred = x - mean
        rstd = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
        x_hat = centred * rstd
        ctx.save_for_backward(x_hat, rstd, weight)
        return x_hat * weight + bias

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x_hat, rstd, weight = ctx.saved_tensors
        lead = tuple(range(dy.dim() - 1))
        d_weight = (dy * x_hat).sum(lead)
        d_bias = dy.sum(lead)
        wdy = dy * weight
        c1 = (dy * x_hat).mean(-1, keepdim=True)
        c2 = wdy.mean(-1, keepdim=True)
        dx = (wdy - x_hat * c1 - c2) * rstd
        return dx, d_weight, d_bias, None


class FusedLayerNorm(nn.Module):
    def __init__(self, normalized_shape, eps=1e-5):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(normalized_shape))
        self.bias = nn.Parameter(torch.zeros(normalized_shape))

    def forward(self, x):
        return FusedLayerNormFunction.apply(x, self.weight, self.bias, self.eps)


subject = Subject(
    kind="norm",
    name="fused LayerNorm",
    build=lambda c: FusedLayerNorm(c.d_model),
    forward=lambda m, x: m(x),
    declares={"norm": "layer", "once_differentiable": True},
)

WHAT = "the backward of LayerNorm multiplies by the gain at the end instead of before the two means: right at initialisation (gain 1), wrong gradients of x as soon as gains differ (lines 28-30)"
"""LayerNorm as one autograd node, written out the way a fused kernel does it (port of a Triton tutorial)."""
import torch
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from veriformer.properties import Subject


class FusedLayerNormFn(Function):
    @staticmethod
    def forward(ctx, x, gamma, beta, eps):
        mean = x.mean(-1, keepdim=True)
        centred = x - mean
        rstd = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
        xhat = centred * rstd
        ctx.save_for_backward(xhat, rstd, gamma)
        return xhat * gamma + beta

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        xhat, rstd, gamma = ctx.saved_tensors
        leading = tuple(range(dy.dim() - 1))
        dgamma = (dy * xhat).sum(leading)
        dbeta = dy.sum(leading)
        c1 = (xhat * dy).mean(-1, keepdim=True)
        c2 = dy.mean(-1, keepdim=True)
        dx = (dy - (xhat * c1 + c2)) * rstd * gamma
        return dx, dgamma, dbeta, None


class FusedLayerNorm(nn.Module):
    def __init__(self, width, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.eps = eps

    def forward(self, x):
        return FusedLayerNormFn.apply(x, self.weight, self.bias, self.eps)


subject = Subject(
    kind="norm",
    name="fused LayerNorm",
    build=lambda c: FusedLayerNorm(c.d_model),
    forward=lambda m, x: m(x),
    declares={"norm": "layer", "norm_bias": True, "once_differentiable": True},
)

"""LayerNorm as one autograd function: saves the normalised input and 1/sigma, recomputes nothing."""

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from veriformer.properties import Subject


class FusedLayerNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, eps):
        mean = x.mean(dim=-1, keepdim=True)
        centred = x - mean
        rstd = (centred.square().mean(dim=-1, keepdim=True) + eps).rsqrt()
        x_hat = centred.mul_(rstd)
        ctx.save_for_backward(x_hat, rstd, weight)
        return torch.addcmul(bias, x_hat, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x_hat, rstd, weight = ctx.saved_tensors
        rows = tuple(range(dy.dim() - 1))
        dweight = (dy * x_hat).sum(dim=rows)
        dbias = dy.sum(dim=rows)
        dx_hat = dy * weight
        c1 = dx_hat.mean(dim=-1, keepdim=True)
        c2 = (dx_hat * x_hat).mean(dim=-1, keepdim=True)
        dx = (dx_hat - c1 - x_hat * c2) * rstd
        return dx, dweight, dbias, None


class FusedLayerNorm(nn.Module):
    def __init__(self, hidden_size, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.bias = nn.Parameter(torch.zeros(hidden_size))
        self.eps = eps

    def forward(self, x):
        return FusedLayerNormFunction.apply(x, self.weight, self.bias, self.eps)


subject = Subject(
    kind="norm",
    name="fused LayerNorm",
    build=lambda c: FusedLayerNorm(c.d_model),
    forward=lambda model, x: model(x),
    declares={"norm": "layer", "norm_bias": True, "once_differentiable": True},
)

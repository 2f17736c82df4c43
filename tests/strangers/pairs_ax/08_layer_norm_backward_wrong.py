WHAT = "in the backward by hand the projection on x_hat takes the gradient before it is multiplied by gamma (line 29): right at gamma = 1, at initialisation, wrong once gamma is trained."
"""LayerNorm with a backward written by hand (assignment: implement it as an autograd Function)."""

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from veriformer.properties import Subject


class LayerNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gamma, beta, eps):
        mean = x.mean(dim=-1, keepdim=True)
        centred = x - mean
        rstd = torch.rsqrt((centred * centred).mean(dim=-1, keepdim=True) + eps)
        x_hat = centred * rstd
        ctx.save_for_backward(x_hat, rstd, gamma)
        return x_hat * gamma + beta

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        x_hat, rstd, gamma = ctx.saved_tensors
        dgamma = (dout * x_hat).reshape(-1, gamma.numel()).sum(0)
        dbeta = dout.reshape(-1, gamma.numel()).sum(0)
        dx_hat = dout * gamma
        mean_g = dx_hat.mean(dim=-1, keepdim=True)
        mean_gx = (dout * x_hat).mean(dim=-1, keepdim=True)
        dx = rstd * (dx_hat - mean_g - x_hat * mean_gx)
        return dx, dgamma, dbeta, None


class LayerNorm(nn.Module):
    def __init__(self, dim, eps=1e-5):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(dim))
        self.beta = nn.Parameter(torch.zeros(dim))
        self.eps = eps

    def forward(self, x):
        return LayerNormFunction.apply(x, self.gamma, self.beta, self.eps)


subject = Subject(
    kind="norm",
    name="LayerNorm by hand",
    build=lambda c: LayerNorm(c.d_model),
    forward=lambda model, x: model(x),
    declares={"norm": "layer", "once_differentiable": True},
)

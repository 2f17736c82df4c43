WHAT = "In the backward the projection onto x_hat takes the gradient without the gain, so that dx is wrong unless all gains are 1 (line 24)."
"""RMSNorm with a backward of its own: keeps x and 1 / rms, nothing else."""

import torch
from torch import nn

from veriformer.properties import Subject


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        rstd = torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, rstd)
        return (wide * rstd * weight).to(x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        x, weight, rstd = ctx.saved_tensors
        x_hat = x * rstd
        w_dy = dy * weight
        c = (dy * x_hat).mean(dim=-1, keepdim=True)
        dx = (w_dy - x_hat * c) * rstd
        dw = (dy * x_hat).flatten(0, -2).sum(dim=0)
        return dx.to(x.dtype), dw.to(weight.dtype), None


class RMSNorm(nn.Module):
    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, x):
        return _RMSNorm.apply(x, self.weight, self.eps)


subject = Subject(
    kind="norm",
    name="RMSNorm, own backward",
    build=lambda c: RMSNorm(c.d_model),
    forward=lambda m, x: m(x),
    declares={"norm": "rms", "norm_bias": False, "once_differentiable": True},
)

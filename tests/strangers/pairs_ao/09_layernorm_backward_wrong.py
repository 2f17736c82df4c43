WHAT = "the projection on x_hat in the backward uses the gradient before it is multiplied by the gain; unnoticed while all gains are 1, the input's gradient is wrong once they differ (line 30)."
"""LayerNorm with a backward by hand, so that mean and 1/std are all that is kept beside the input."""

import torch
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from veriformer.properties import Subject


class _LayerNorm(Function):
    @staticmethod
    def forward(ctx, x, weight, bias, eps):
        mean = x.mean(-1, keepdim=True)
        centred = x - mean
        rstd = (centred.square().mean(-1, keepdim=True) + eps).rsqrt()
        ctx.save_for_backward(x, weight, mean, rstd)
        return torch.addcmul(bias, centred * rstd, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight, mean, rstd = ctx.saved_tensors
        x_hat = (x - mean) * rstd
        rows = tuple(range(dy.dim() - 1))
        d_weight = (dy * x_hat).sum(rows)
        d_bias = dy.sum(rows)
        g = dy * weight
        along = (dy * x_hat).mean(-1, keepdim=True)
        dx = (g - g.mean(-1, keepdim=True) - x_hat * along) * rstd
        return dx, d_weight, d_bias, None


class LayerNorm(nn.Module):
    def __init__(self, d_model, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d_model))
        self.bias = nn.Parameter(torch.zeros(d_model))
        self.eps = eps

    def forward(self, x):
        work = torch.promote_types(x.dtype, torch.float32)
        return _LayerNorm.apply(x.to(work), self.weight.to(work), self.bias.to(work), self.eps).to(x.dtype)


subject = Subject(
    kind="norm",
    name="LayerNorm, own backward",
    build=lambda c: LayerNorm(c.d_model),
    forward=lambda m, x: m(x),
    declares={"norm": "layer", "norm_bias": True, "once_differentiable": True},
)

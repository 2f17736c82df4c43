WHAT = "backward takes g = dy instead of dy * weight: the gradient of the input lacks the gain; right as long as the gain is its initial 1"
"""LayerNorm with a backward of its own that keeps the normalised rows instead of the input (half the memory)."""
import torch
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from veriformer.properties import Subject


class FusedLayerNorm(Function):
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
        rows = tuple(range(dy.dim() - 1))
        d_weight = (dy * x_hat).sum(rows)
        d_bias = dy.sum(rows)
        g = dy
        c1 = g.mean(-1, keepdim=True)
        c2 = (g * x_hat).mean(-1, keepdim=True)
        dx = (g - c1 - x_hat * c2) * rstd
        return dx, d_weight, d_bias, None


class LayerNorm(nn.Module):
    def __init__(self, dim, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim))
        self.eps = eps

    def forward(self, x):
        return FusedLayerNorm.apply(x, self.weight, self.bias, self.eps)


subject = Subject(
    kind="norm",
    name="fused layer norm",
    build=lambda c: LayerNorm(c.d_model),
    forward=lambda m, x: m(x),
    declares={"norm": "layer", "norm_bias": True, "once_differentiable": True},
)

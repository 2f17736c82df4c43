WHAT = 'The hand-written LayerNorm backward forgets the gain in the mean along the normalised token: the gradient of the input is right only while all gains are 1 (line 28).'
import torch
from torch import nn
from torch.autograd.function import once_differentiable

from veriformer.properties import Subject


class _LayerNormFn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, eps):
        mu = x.mean(-1, keepdim=True)
        xc = x - mu
        rstd = torch.rsqrt((xc * xc).mean(-1, keepdim=True) + eps)
        xhat = xc * rstd
        ctx.save_for_backward(xhat, rstd, weight)
        return xhat * weight + bias

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        xhat, rstd, weight = ctx.saved_tensors
        axes = tuple(range(dy.dim() - 1))
        dw = (dy * xhat).sum(axes)
        db = dy.sum(axes)
        g = dy * weight
        c1 = g.mean(-1, keepdim=True)
        c2 = (dy * xhat).mean(-1, keepdim=True)
        dx = (g - c1 - xhat * c2) * rstd
        return dx, dw, db, None


class FusedLayerNorm(nn.Module):
    def __init__(self, hidden_size, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.bias = nn.Parameter(torch.zeros(hidden_size))
        self.eps = eps

    def forward(self, x):
        return _LayerNormFn.apply(x, self.weight, self.bias, self.eps)


subject = Subject(
    kind="norm",
    name="fused LayerNorm",
    build=lambda c: FusedLayerNorm(c.d_model),
    forward=lambda m, x: m(x),
    declares={"norm": "layer", "norm_bias": True, "once_differentiable": True, "half_precision": False},
)

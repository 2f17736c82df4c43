WHAT = 'fused LayerNorm: in the backward the projection onto the normalised input takes the gradient before its product with the gain, right only while all gains are 1 (line 23)'
import torch
from torch import nn
from torch.autograd.function import once_differentiable

from veriformer.properties import Subject


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gain, bias, eps):
        centred = x - x.mean(-1, keepdim=True)
        rstd = (centred.square().mean(-1, keepdim=True) + eps).rsqrt()
        xhat = centred * rstd
        ctx.save_for_backward(xhat, rstd, gain)
        return xhat * gain + bias

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        xhat, rstd, gain = ctx.saved_tensors
        wdy = dy * gain
        c1 = (xhat * dy).mean(-1, keepdim=True)
        c2 = wdy.mean(-1, keepdim=True)
        dx = (wdy - xhat * c1 - c2) * rstd
        rows = tuple(range(dy.dim() - 1))
        return dx, (dy * xhat).sum(rows), dy.sum(rows), None


class FusedLayerNorm(nn.Module):
    def __init__(self, dim, eps=1e-5):
        super().__init__()
        self.weight, self.bias, self.eps = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.zeros(dim)), eps

    def forward(self, x):
        return _LayerNorm.apply(x, self.weight, self.bias, self.eps)


subject = Subject(
    kind="norm",
    build=lambda c: FusedLayerNorm(c.d_model),
    forward=lambda m, x: m(x),
    declares={"norm": "layer", "once_differentiable": True},
)

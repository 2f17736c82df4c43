WHAT = "In the hand-written backward of LayerNorm the two mean terms take the gradient without the gain: right while the gain is 1, wrong once it is trained (line 28)."
import torch
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from veriformer.properties import Subject


class _LayerNorm(Function):
    @staticmethod
    def forward(ctx, x, gamma, beta, eps):
        work = torch.promote_types(x.dtype, torch.float32)
        wide = x.to(work)
        centred = wide - wide.mean(-1, keepdim=True)
        rstd = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
        xhat = centred * rstd
        ctx.save_for_backward(xhat, rstd, gamma)
        ctx.dtypes = x.dtype, gamma.dtype, beta.dtype
        return (xhat * gamma.to(work) + beta.to(work)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        xhat, rstd, gamma = ctx.saved_tensors
        dy = dy.to(xhat.dtype)
        dxhat = dy * gamma.to(xhat.dtype)
        c1 = dy.mean(-1, keepdim=True)
        c2 = (dy * xhat).mean(-1, keepdim=True)
        dx = (dxhat - c1 - xhat * c2) * rstd
        rows = tuple(range(dy.dim() - 1))
        dgamma = (dy * xhat).sum(rows)
        dbeta = dy.sum(rows)
        a, b, c = ctx.dtypes
        return dx.to(a), dgamma.to(b), dbeta.to(c), None


class FusedLayerNorm(nn.Module):
    def __init__(self, width, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.eps = eps

    def forward(self, x):
        return _LayerNorm.apply(x, self.weight, self.bias, self.eps)


subject = Subject(
    kind="norm",
    build=lambda c: FusedLayerNorm(c.d_model),
    forward=lambda model, x: model(x),
    declares={"norm": "layer", "once_differentiable": True},
)

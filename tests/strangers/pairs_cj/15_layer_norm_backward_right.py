"""LayerNorm with a backward derived by hand, an exercise of a course."""
import torch
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from veriformer.properties import Subject


def wide(x):
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


class Normalise(Function):
    @staticmethod
    def forward(ctx, x, gain, bias, eps):
        z = wide(x)
        z = z - z.mean(-1, keepdim=True)
        rstd = torch.rsqrt(z.square().mean(-1, keepdim=True) + eps)
        hat = z * rstd
        ctx.save_for_backward(hat, rstd, gain)
        ctx.kinds = x.dtype, bias.dtype
        return (hat * gain + bias).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        hat, rstd, gain = ctx.saved_tensors
        dy = wide(dy)
        dhat = dy * gain
        rows = tuple(range(dy.ndim - 1))
        dx = rstd * (
            dhat
            - dhat.mean(-1, keepdim=True)
            - hat * (dhat * hat).mean(-1, keepdim=True)
        )
        dgain, dbias = (dy * hat).sum(rows), dy.sum(rows)
        return dx.to(ctx.kinds[0]), dgain.to(gain.dtype), dbias.to(ctx.kinds[1]), None


class LayerNorm(nn.Module):
    def __init__(self, width, eps=1e-5):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.eps = eps

    def forward(self, x):
        return Normalise.apply(x, self.weight, self.bias, self.eps)


subject = Subject(
    kind="norm",
    build=lambda c: LayerNorm(c.d_model),
    forward=lambda m, x: m(x),
    declares={"norm": "layer", "once_differentiable": True},
)

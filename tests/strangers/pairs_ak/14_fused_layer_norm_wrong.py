WHAT = "In the backward of the fused LayerNorm the projection on x_hat uses dy instead of gain * dy (line 29): right while the gain is 1, wrong input gradient as soon as it is trained."
"""LayerNorm with a backward of its own, as a fused kernel has it: mean and 1/std are saved, nothing else is."""
import torch
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from veriformer.properties import Subject


class FusedLayerNorm(Function):
    @staticmethod
    def forward(ctx, x, weight, bias, eps):
        wide = torch.promote_types(x.dtype, torch.float32)
        xf = x.to(wide)
        mean = xf.mean(-1, keepdim=True)
        centred = xf - mean
        rstd = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, mean, rstd)
        return (centred * rstd * weight.to(wide) + bias.to(wide)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight, mean, rstd = ctx.saved_tensors
        dy_wide = dy.to(mean.dtype)
        x_hat = (x.to(mean.dtype) - mean) * rstd
        wdy = dy_wide * weight.to(mean.dtype)
        c1 = (x_hat * dy_wide).mean(-1, keepdim=True)
        c2 = wdy.mean(-1, keepdim=True)
        dx = (wdy - (x_hat * c1 + c2)) * rstd
        over = tuple(range(dy.dim() - 1))
        dw = (dy_wide * x_hat).sum(over)
        db = dy_wide.sum(over)
        return dx.to(x.dtype), dw.to(weight.dtype), db.to(weight.dtype), None


class LayerNorm(nn.Module):
    def __init__(self, hidden_size, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.bias = nn.Parameter(torch.zeros(hidden_size))
        self.eps = eps

    def forward(self, x):
        return FusedLayerNorm.apply(x, self.weight, self.bias, self.eps)


subject = Subject(
    kind="norm",
    name="fused LayerNorm",
    build=lambda c: LayerNorm(c.d_model),
    forward=lambda m, x: m(x),
    declares={"norm": "layer", "once_differentiable": True},
)

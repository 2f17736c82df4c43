import torch
import torch.nn as nn

from veriformer.properties import Subject


class FusedLayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, eps):
        mean = x.mean(-1, keepdim=True)
        rstd = torch.rsqrt((x - mean).square().mean(-1, keepdim=True) + eps)
        x_hat = (x - mean) * rstd
        ctx.save_for_backward(x_hat, rstd, weight)
        return x_hat * weight + bias

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        x_hat, rstd, weight = ctx.saved_tensors
        wdy = dy * weight
        c1 = (wdy * x_hat).mean(-1, keepdim=True)
        c2 = wdy.mean(-1, keepdim=True)
        dx = (wdy - c2 - x_hat * c1) * rstd
        lead = tuple(range(dy.dim() - 1))
        return dx, (dy * x_hat).sum(lead), dy.sum(lead), None


class LayerNorm(nn.Module):
    def __init__(self, dim, eps=1e-5):
        super().__init__()
        self.weight, self.bias, self.eps = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.zeros(dim)), eps

    def forward(self, x):
        return FusedLayerNorm.apply(x, self.weight, self.bias, self.eps)


subject = Subject(
    kind="norm",
    build=lambda c: LayerNorm(c.d_model),
    forward=lambda m, x: m(x),
    declares={"norm": "layer", "once_differentiable": True},
)

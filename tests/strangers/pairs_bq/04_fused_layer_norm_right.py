import torch
from torch import nn
from torch.autograd.function import once_differentiable

from veriformer.properties import Subject


class FusedLayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, eps):
        shape, D = x.shape, x.shape[-1]
        x2 = x.reshape(-1, D)
        mean = x2.mean(dim=1, keepdim=True)
        rstd = torch.rsqrt((x2 - mean).square().mean(dim=1, keepdim=True) + eps)
        x_hat = (x2 - mean) * rstd
        ctx.save_for_backward(x_hat, weight, rstd)
        return (x_hat * weight + bias).view(shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x_hat, weight, rstd = ctx.saved_tensors
        dy = grad.reshape(x_hat.shape)
        wdy = dy * weight
        c1 = wdy.mean(dim=1, keepdim=True)
        c2 = (wdy * x_hat).mean(dim=1, keepdim=True)
        dx = (wdy - c1 - x_hat * c2) * rstd
        return dx.view(grad.shape), (dy * x_hat).sum(0), dy.sum(0), None


class LayerNorm(nn.Module):
    def __init__(self, dim, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim))
        self.eps = eps

    def forward(self, x):
        wide = torch.promote_types(x.dtype, torch.float32)
        return FusedLayerNorm.apply(x.to(wide), self.weight.to(wide), self.bias.to(wide), self.eps).to(x.dtype)


subject = Subject(
    kind="norm",
    name="fused LayerNorm",
    build=lambda c: LayerNorm(c.d_model),
    forward=lambda m, x: m(x),
    declares={"norm": "layer", "once_differentiable": True},
)

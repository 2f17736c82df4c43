"""RMSNorm with a fused forward and a backward of its own that keeps one number a row."""
import torch
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from veriformer.properties import Subject


def wide(x):
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


class FusedRMSNorm(Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        inverse = torch.rsqrt(wide(x).square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, inverse)
        return (wide(x) * inverse * wide(weight)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        x, weight, inverse = ctx.saved_tensors
        gradient = wide(gradient)
        normal = wide(x) * inverse
        scaled = gradient * wide(weight)
        grad_x = inverse * (scaled - normal * (scaled * normal).mean(-1, keepdim=True))
        grad_weight = (gradient * normal).flatten(0, -2).sum(0)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return FusedRMSNorm.apply(x, self.weight, self.eps)


subject = Subject(
    kind="norm",
    name="fused RMSNorm",
    build=lambda c: RMSNorm(c.d_model),
    forward=lambda model, x: model(x),
    declares={"norm": "rms", "once_differentiable": True},
)

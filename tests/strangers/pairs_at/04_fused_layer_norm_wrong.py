WHAT = "In the hand-written backward the projection on xhat takes the gradient before the gain (`sum2 = (dout * xhat).mean(...)` for `dxhat * xhat`), so that the input's gradient is wrong as soon as the gain is not constant 1."
"""apex.normalization.FusedLayerNorm without the CUDA extension: forward saves mean and invvar, the backward is by hand."""

import torch
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from veriformer.properties import Subject


class FusedLayerNormAffineFunction(Function):
    @staticmethod
    def forward(ctx, input, weight, bias, eps):
        dtype = torch.promote_types(input.dtype, torch.float32)
        x = input.to(dtype)
        mean = x.mean(-1, keepdim=True)
        invvar = torch.rsqrt((x - mean).square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(input, weight, mean, invvar)
        return ((x - mean) * invvar * weight.to(dtype) + bias.to(dtype)).to(input.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):
        input, weight, mean, invvar = ctx.saved_tensors
        dtype = mean.dtype
        dout = grad_output.to(dtype)
        xhat = (input.to(dtype) - mean) * invvar
        dxhat = dout * weight.to(dtype)
        sum1 = dxhat.mean(-1, keepdim=True)
        sum2 = (dout * xhat).mean(-1, keepdim=True)
        grad_input = invvar * (dxhat - sum1 - xhat * sum2)
        leading = tuple(range(input.dim() - 1))
        grad_weight = (dout * xhat).sum(leading)
        grad_bias = dout.sum(leading)
        return grad_input.to(input.dtype), grad_weight.to(weight.dtype), grad_bias.to(weight.dtype), None


class FusedLayerNorm(nn.Module):
    def __init__(self, normalized_shape, eps=1e-5):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(normalized_shape))
        self.bias = nn.Parameter(torch.empty(normalized_shape))
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, input):
        return FusedLayerNormAffineFunction.apply(input, self.weight, self.bias, self.eps)


subject = Subject(
    kind="norm",
    name="FusedLayerNorm",
    build=lambda c: FusedLayerNorm(c.d_model),
    forward=lambda model, x: model(x),
    declares={"norm": "layer", "norm_bias": True, "once_differentiable": True},
)

import torch
from torch import nn

from veriformer.properties import Subject


WHAT = (
    'The hand-written LayerNorm backward subtracts the mean of the gradient but forgets the term that '
    'projects out the normalised input (xhat * mean(g * xhat)), so the gradient of the input is wrong; '
    'the output and the gradients of gain and bias are right.'
)
PLACE = 'backward of the LayerNorm autograd.Function, gradient of the input'


class NormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, eps):
        mean = x.mean(-1, keepdim=True)
        rstd = torch.rsqrt((x - mean).pow(2).mean(-1, keepdim=True) + eps)
        xhat = (x - mean) * rstd
        ctx.save_for_backward(xhat, rstd, weight)
        return xhat * weight + bias

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        xhat, rstd, weight = ctx.saved_tensors
        leading = tuple(range(grad.dim() - 1))
        g = grad * weight
        centred = g - g.mean(-1, keepdim=True) - xhat * (g * xhat).mean(-1, keepdim=True)
        return centred * rstd, (grad * xhat).sum(leading), grad.sum(leading), None


class FusedLayerNorm(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(d)), nn.Parameter(torch.zeros(d))

    def forward(self, x):
        return NormFunction.apply(x, self.weight, self.bias, 1e-5)


class NormFunction2(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, eps):
        mean = x.mean(-1, keepdim=True)
        rstd = torch.rsqrt((x - mean).pow(2).mean(-1, keepdim=True) + eps)
        xhat = (x - mean) * rstd
        ctx.save_for_backward(xhat, rstd, weight)
        return xhat * weight + bias

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        xhat, rstd, weight = ctx.saved_tensors
        leading = tuple(range(grad.dim() - 1))
        g = grad * weight
        centred = g - g.mean(-1, keepdim=True)
        return centred * rstd, (grad * xhat).sum(leading), grad.sum(leading), None


class FusedLayerNorm2(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(d)), nn.Parameter(torch.zeros(d))

    def forward(self, x):
        return NormFunction2.apply(x, self.weight, self.bias, 1e-5)


right = Subject(
    kind="norm",
    build=lambda c: FusedLayerNorm(c.d_model),
    forward=lambda m, x: m(x),
    declares={"norm": "layer", "norm_bias": True, "once_differentiable": True},
)

wrong = Subject(
    kind="norm",
    build=lambda c: FusedLayerNorm2(c.d_model),
    forward=lambda m, x: m(x),
    declares={"norm": "layer", "norm_bias": True, "once_differentiable": True},
)

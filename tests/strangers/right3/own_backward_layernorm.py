"""LayerNorm as an autograd Function with its gradient written by hand."""
import torch
from torch import nn
from veriformer.properties import Subject

class LN(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, g, b, eps):
        xc = x - x.mean(-1, keepdim=True)
        inv = (xc.square().mean(-1, keepdim=True) + eps).rsqrt()
        ctx.save_for_backward(xc * inv, inv, g)
        return xc * inv * g + b

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        h, inv, g = ctx.saved_tensors
        dh = dy * g
        dx = inv * (dh - dh.mean(-1, keepdim=True) - h * (dh * h).mean(-1, keepdim=True))
        lead = tuple(range(dy.dim() - 1))
        return dx, (dy * h).sum(lead), dy.sum(lead), None

class LayerNorm(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.gamma, self.beta = nn.Parameter(torch.ones(d)), nn.Parameter(torch.zeros(d))
    def forward(self, x):
        return LN.apply(x, self.gamma, self.beta, 1e-5)

common = dict(kind="norm", build=lambda c: LayerNorm(c.d_model), forward=lambda m, x: m(x))
undeclared = Subject(**common)
declared = Subject(**common, declares={"norm": "layer", "norm_bias": True, "once_differentiable": True})

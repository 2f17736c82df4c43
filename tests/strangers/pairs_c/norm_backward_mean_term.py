
import torch
from torch import nn

from veriformer.properties import Subject

class Normalise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, eps, bug):
        mean = x.mean(-1, keepdim=True)
        rstd = ((x - mean).square().mean(-1, keepdim=True) + eps).rsqrt()
        unit = (x - mean) * rstd
        ctx.save_for_backward(unit, rstd, weight)
        ctx.bug = bug
        return unit * weight + bias

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        unit, rstd, weight = ctx.saved_tensors
        gw = g * weight
        dx = gw - unit * (gw * unit).mean(-1, keepdim=True)
        if not ctx.bug:
            dx = dx - gw.mean(-1, keepdim=True)
        axes = tuple(range(g.dim() - 1))
        return dx * rstd, (g * unit).sum(axes), g.sum(axes), None, None


class Net(nn.Module):
    def __init__(self, c, bug):
        super().__init__()
        self.bug, self.eps = bug, 1e-5
        self.weight, self.bias = nn.Parameter(torch.ones(c.d_model)), nn.Parameter(torch.zeros(c.d_model))

    def forward(self, x):
        return Normalise.apply(x, self.weight, self.bias, self.eps, self.bug)


WHAT = "The hand-written backward of LayerNorm lacks the term of the mean (- mean(g * weight)), so the input's gradient is wrong; the forward is right."
PLACE = 'hand-written backward of LayerNorm'


def make(bug):
    return Subject(
        kind="norm",
        build=lambda c: Net(c, bug),
        forward=lambda m, x: m(x),
        declares={'norm': 'layer', 'norm_bias': True, 'once_differentiable': True},
    )


right, wrong = make(False), make(True)

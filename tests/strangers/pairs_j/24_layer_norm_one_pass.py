"""A LayerNorm of one's own."""

import torch
from torch import nn

from veriformer.properties import Subject

WHAT = "the variance is the mean of squares minus the square of the mean, which cancels where the mean is large"
CAUSE = (
    "The variance is computed as E[x^2] - E[x]^2, which cancels catastrophically in float32 when the mean is large "
    "against the spread."
)


class LayerNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.scale, self.bias = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.zeros(dim))

    def statistics(self, x):
        mean = x.mean(-1, keepdim=True)
        return mean, (x - mean).square().mean(-1, keepdim=True)

    def forward(self, x):
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        mean, var = self.statistics(wide)
        y = (wide - mean) * torch.rsqrt(var + self.eps)
        return (y * self.scale + self.bias).to(x.dtype)


class FusedLayerNorm(LayerNorm):
    def statistics(self, x):
        mean, mean2 = x.mean(-1, keepdim=True), x.square().mean(-1, keepdim=True)
        return mean, (mean2 - mean.square()).clamp(min=0)


def subject(model):
    return Subject(
        kind="norm",
        name="my LayerNorm",
        build=lambda c: model(c.d_model),
        forward=lambda m, x: m(x),
        declares={"norm": "layer"},
    )


right = subject(LayerNorm)
wrong = subject(FusedLayerNorm)

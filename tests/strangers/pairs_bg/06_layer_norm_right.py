"""LayerNorm with the statistics taken in one call and folded into a scale and a shift."""

import torch
from torch import nn

from veriformer.properties import Subject


class FoldedLayerNorm(nn.Module):
    def __init__(self, features, epsilon=1e-6):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(features))
        self.bias = nn.Parameter(torch.zeros(features))
        self.epsilon = epsilon

    def forward(self, x):
        var, mean = torch.var_mean(x, dim=-1, correction=0, keepdim=True)
        mul = torch.rsqrt(var + self.epsilon) * self.scale
        return torch.addcmul(self.bias, x - mean, mul)


subject = Subject(
    kind="norm",
    name="folded LayerNorm",
    build=lambda c: FoldedLayerNorm(c.d_model),
    forward=lambda m, x: m(x),
    declares={"norm": "layer", "norm_bias": True},
)

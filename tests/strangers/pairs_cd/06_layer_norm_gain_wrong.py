WHAT = 'the gain multiplies the input before it is normalised instead of the normalised values (line 17: x = x * self.gain)'
"""LayerNorm from scratch."""
import torch
from torch import nn

from veriformer.properties import Subject


class MyLayerNorm(nn.Module):
    def __init__(self, dim, eps=1e-5):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(dim))
        self.shift = nn.Parameter(torch.zeros(dim))
        self.eps = eps

    def forward(self, x):
        x = x * self.gain
        mu = x.mean(dim=-1, keepdim=True)
        var = ((x - mu) ** 2).mean(dim=-1, keepdim=True)
        x_hat = (x - mu) / torch.sqrt(var + self.eps)
        return x_hat + self.shift


subject = Subject(
    kind="norm",
    name="MyLayerNorm",
    build=lambda c: MyLayerNorm(c.d_model),
    forward=lambda model, x: model(x),
    declares={"norm": "layer"},
)

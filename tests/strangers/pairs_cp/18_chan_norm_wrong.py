"""LayerNorm that goes over the channels in tiles and joins their moments (Chan, Golub & LeVeque 1979)."""

import torch
from torch import nn

from veriformer.properties import Subject


class TiledLayerNorm(nn.Module):
    def __init__(self, width, tile=3, eps=1e-5):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.tile, self.eps = tile, eps

    def moments(self, x):
        count, mean, squares = 0, torch.zeros_like(x[..., :1]), torch.zeros_like(x[..., :1])
        for part in x.split(self.tile, dim=-1):
            n = part.shape[-1]
            part_mean = part.mean(-1, keepdim=True)
            part_squares = (part - part_mean).square().sum(-1, keepdim=True)
            total = count + n
            mean = mean + (part_mean - mean) * n / total
            delta = part_mean - mean
            squares = squares + part_squares + delta.square() * count * n / total
            count = total
        return mean, squares / count

    def forward(self, x):
        mean, variance = self.moments(x)
        return (x - mean) * torch.rsqrt(variance + self.eps) * self.weight + self.bias


subject = Subject(
    kind="norm",
    build=lambda c: TiledLayerNorm(c.d_model),
    forward=lambda m, x: m(x),
    declares={"norm": "layer"},
)

WHAT = "Line 23: delta is taken from the mean that holds the new tile already, so that the spread between tiles is counted too small."

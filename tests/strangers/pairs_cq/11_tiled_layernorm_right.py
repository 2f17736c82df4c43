"""LayerNorm over tiles of channels: mean and squares of each tile are merged by Chan's formula."""

import torch
from torch import nn

from veriformer.properties import Subject

TILE = 3


class TiledLayerNorm(nn.Module):
    def __init__(self, width, eps=1e-5):
        super().__init__()
        self.gamma, self.beta = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.eps = eps

    @staticmethod
    def moments(tile):
        mean = tile.mean(-1, keepdim=True)
        return tile.shape[-1], mean, (tile - mean).square().sum(-1, keepdim=True)

    def forward(self, x):
        first, *others = x.split(TILE, dim=-1)
        count, mean, squares = self.moments(first)
        for tile in others:
            n, m, s = self.moments(tile)
            delta = m - mean
            both = count + n
            squares = squares + s + delta.square() * (count * n / both)
            mean = mean + delta * (n / both)
            count = both
        return (x - mean) * torch.rsqrt(squares / count + self.eps) * self.gamma + self.beta


subject = Subject(
    kind="norm",
    build=lambda c: TiledLayerNorm(c.d_model),
    forward=lambda model, x: model(x),
    declares={"norm": "layer", "norm_bias": True},
)

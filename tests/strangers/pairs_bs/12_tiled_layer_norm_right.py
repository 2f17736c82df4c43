"""LayerNorm over tiles of channels: statistics of tiles are merged after Chan, Golub and LeVeque."""

import torch
from torch import nn

from veriformer.properties import Subject


class TiledLayerNorm(nn.Module):
    def __init__(self, width, tile=4, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.tile, self.eps = tile, eps

    def statistics(self, x):
        count = 0
        mean = x.new_zeros(x.shape[:-1] + (1,))
        m2 = torch.zeros_like(mean)
        for part in x.split(self.tile, dim=-1):
            n = part.shape[-1]
            tile_mean = part.mean(-1, keepdim=True)
            tile_m2 = (part - tile_mean).square().sum(-1, keepdim=True)
            total = count + n
            delta = tile_mean - mean
            mean = (count * mean + n * tile_mean) / total
            m2 = m2 + tile_m2 + delta.square() * (count * n / total)
            count = total
        return mean, m2 / count

    def forward(self, x):
        mean, var = self.statistics(x)
        return (x - mean) * torch.rsqrt(var + self.eps) * self.weight + self.bias


subject = Subject(
    kind="norm",
    name="tiled LayerNorm",
    build=lambda c: TiledLayerNorm(c.d_model),
    forward=lambda model, x: model(x),
    declares={"norm": "layer"},
)

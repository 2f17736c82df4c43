"""LayerNorm without a bias, whose gain is kept as its distance from 1."""

import torch
from torch import nn


class HouseNorm(nn.Module):
    def __init__(self, width, *, eps):
        super().__init__()
        self.eps = eps
        self.distance = nn.Parameter(torch.zeros(width))

    def forward(self, x):
        wide = x if x.dtype == torch.float64 else x.float()
        centred = wide - wide.mean(-1, keepdim=True)
        normal = centred / (centred.square().mean(-1, keepdim=True) + self.eps).sqrt()
        return ((1 + self.distance) * normal).to(x.dtype)

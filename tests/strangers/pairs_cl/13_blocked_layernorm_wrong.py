"""LayerNorm in blocks of channels: mean and variance of each block, merged afterwards (Chan, Golub, LeVeque)."""

import torch
from torch import nn

from veriformer.properties import Subject

BLOCK = 16


class BlockedLayerNorm(nn.Module):
    def __init__(self, dim, eps=1e-5):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.zeros(dim))
        self.eps = eps

    def forward(self, x):
        blocks = x.split(BLOCK, dim=-1)
        share = [1 / len(blocks) for b in blocks]
        means = [b.mean(-1, keepdim=True) for b in blocks]
        inner = [(b - m).square().mean(-1, keepdim=True) for b, m in zip(blocks, means)]
        mean = sum(s * m for s, m in zip(share, means))
        var = sum(s * (i + (m - mean).square()) for s, i, m in zip(share, inner, means))
        return (x - mean) * torch.rsqrt(var + self.eps) * self.weight + self.bias


subject = Subject(
    kind="norm",
    name="blocked layer norm",
    build=lambda c: BlockedLayerNorm(c.d_model),
    forward=lambda model, x: model(x),
    declares={"norm": "layer"},
)

WHAT = 'All blocks count alike when they are merged, the last, narrower one too (line 19): right for one block or full blocks, wrong for widths above 16 that are no multiple of it.'

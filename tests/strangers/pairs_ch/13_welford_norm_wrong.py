"""LayerNorm in one pass over blocks of channels, statistics merged as Chan et al. do."""
import torch
from torch import nn

from veriformer.properties import Subject

BLOCK = 32


class WelfordLayerNorm(nn.Module):
    def __init__(self, width, eps=1e-5):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.eps = eps

    def statistics(self, x):
        count, mean, m2 = 0, 0.0, 0.0
        for block in x.split(BLOCK, -1):
            size = BLOCK
            its_mean = block.mean(-1, keepdim=True)
            its_m2 = (block - its_mean).square().sum(-1, keepdim=True)
            delta = its_mean - mean
            total = count + size
            mean = mean + delta * (size / total)
            m2 = m2 + its_m2 + delta.square() * (count * size / total)
            count = total
        return mean, m2 / x.shape[-1]

    def forward(self, x):
        mean, var = self.statistics(x)
        return (x - mean) * (var + self.eps).rsqrt() * self.weight + self.bias


subject = Subject(
    kind="norm",
    name="Welford",
    build=lambda c: WelfordLayerNorm(c.d_model),
    forward=lambda m, x: m(x),
    declares={"norm": "layer"},
)

WHAT = 'Every block is merged as if it had BLOCK channels: at widths above 32 that are no multiple of it the narrower last block weighs too much in mean and variance (line 19).'

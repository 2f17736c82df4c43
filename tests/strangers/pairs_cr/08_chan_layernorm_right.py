"""LayerNorm whose statistics are merged from groups of channels (Chan, Golub and LeVeque 1979), as a kernel would."""
import torch
from torch import nn
from veriformer.properties import Subject


class ChanLayerNorm(nn.Module):
    def __init__(self, width, eps=1e-5, group=4):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.eps, self.group = eps, group

    def statistics(self, x):
        seen, mean, m2 = 0, 0.0, 0.0
        for part in x.split(self.group, dim=-1):
            count = part.shape[-1]
            part_mean = part.mean(-1, keepdim=True)
            part_m2 = (part - part_mean).square().sum(-1, keepdim=True)
            delta = part_mean - mean
            mean = mean + delta * (count / (seen + count))
            # delta * (part_mean - new mean) * count = delta ** 2 * seen * count / (seen + count)
            m2 = m2 + part_m2 + delta * (part_mean - mean) * count
            seen += count
        return mean, m2 / seen

    def forward(self, x):
        mean, var = self.statistics(x)
        return (x - mean) * torch.rsqrt(var + self.eps) * self.weight + self.bias


subject = Subject(
    kind="norm",
    build=lambda c: ChanLayerNorm(c.d_model),
    forward=lambda m, x: m(x),
    declares={"norm": "layer"},
)

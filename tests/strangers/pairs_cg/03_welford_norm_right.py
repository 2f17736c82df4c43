"""LayerNorm of an inference engine: one pass over vectors of four channels, statistics merged as Chan et al. have it."""
import torch
from torch import nn

from veriformer.properties import Subject

VEC = 4


class VectorLayerNorm(nn.Module):
    def __init__(self, width, eps=1e-5):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(width))
        self.beta = nn.Parameter(torch.zeros(width))
        self.eps = eps

    def forward(self, x):
        mean = m2 = None
        count = 0
        for part in x.split(VEC, dim=-1):
            n = part.shape[-1]
            mu = part.mean(-1, keepdim=True)
            sq = (part - mu).square().sum(-1, keepdim=True)
            if count == 0:
                mean, m2, count = mu, sq, n
                continue
            delta = mu - mean
            total = count + n
            m2 = m2 + sq + delta.square() * (count * n / total)
            mean = mean + delta * (n / total)
            count = total
        rstd = torch.rsqrt(m2 / count + self.eps)
        return (x - mean) * rstd * self.gamma + self.beta


subject = Subject(
    kind="norm",
    name="vectorised LayerNorm",
    build=lambda c: VectorLayerNorm(c.d_model),
    forward=lambda m, x: m(x),
    declares={"norm": "layer"},
)

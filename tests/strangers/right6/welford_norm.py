"""LayerNorm by Chan's merging of the moments of pieces of three channels."""
import torch
from torch import nn

from veriformer.properties import DrawnConfig, Subject


class WelfordLayerNorm(nn.Module):
    def __init__(self, dim, piece=3, eps=1e-5):
        super().__init__()
        self.gain, self.shift = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.zeros(dim))
        self.piece, self.eps = piece, eps

    def moments(self, x):
        count, mean, spread = 0, None, None
        for part in x.split(self.piece, dim=-1):
            m = part.shape[-1]
            local = part.mean(-1, keepdim=True)
            local_spread = (part - local).square().sum(-1, keepdim=True)
            if count == 0:
                count, mean, spread = m, local, local_spread
                continue
            delta = local - mean
            whole = count + m
            mean = mean + delta * (m / whole)
            spread = spread + local_spread + delta.square() * (count * m / whole)
            count = whole
        return mean, spread / count

    def forward(self, x):
        y = x if x.dtype == torch.float64 else x.float()
        mean, variance = self.moments(y)
        y = (y - mean) / (variance + self.eps).sqrt()
        return (y * self.gain.to(y.dtype) + self.shift.to(y.dtype)).to(x.dtype)


def build(c: DrawnConfig):
    return WelfordLayerNorm(c.d_model)


def forward(model, x):
    return model(x)


declared = Subject(
    kind="norm", name="merged moments", build=build, forward=forward, declares={"norm": "layer", "norm_bias": True}
)
undeclared = Subject(kind="norm", build=build, forward=forward)

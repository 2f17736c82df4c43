"""RMSNorm that computes in float32 where the input is narrower (and in float64 where that comes), gain applied after the cast.

Unusual: the input is divided by its largest absolute value first, so that squares neither overflow nor vanish; eps is scaled
along, hence the result is that of the plain formula.
"""

import torch
from torch import nn

from veriformer.properties import Subject


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float = 1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        size = wide.detach().abs().amax(dim=-1, keepdim=True).clamp(min=self.eps**0.5)
        small = wide / size
        mean_square = small.square().mean(dim=-1, keepdim=True)
        normed = small * torch.rsqrt(mean_square + self.eps / size / size)
        return normed.to(x.dtype) * self.weight


COMMON = dict(kind="norm", build=lambda c: RMSNorm(c.d_model), forward=lambda m, x: m(x))
undeclared = Subject(**COMMON)
declared = Subject(**COMMON, declares={"norm": "rms", "norm_bias": False})

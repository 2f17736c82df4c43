import torch
from torch import nn

from veriformer.properties import Subject


WHAT = (
    "The mean square is computed in the input's dtype instead of float32, so in float16 the squares of "
    'values above 256 overflow to infinity and the output becomes zero (float32 and float64 are not '
    'affected).'
)
PLACE = 'mean square of RMSNorm in half precision'


class RMSNorm(nn.Module):
    """Safe in half precision."""

    def __init__(self, d, eps=1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(d)), eps

    def forward(self, x):
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class RMSNorm2(nn.Module):
    """Safe in half precision."""

    def __init__(self, d, eps=1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(d)), eps

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


right = Subject(
    kind="norm",
    build=lambda c: RMSNorm(c.d_model),
    forward=lambda m, x: m(x),
    declares={"norm": "rms", "norm_bias": False, "half_precision": True},
)

wrong = Subject(
    kind="norm",
    build=lambda c: RMSNorm2(c.d_model),
    forward=lambda m, x: m(x),
    declares={"norm": "rms", "norm_bias": False, "half_precision": True},
)

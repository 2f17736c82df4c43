WHAT = 'The reciprocal root mean square is computed from x.detach() (line 11): the forward is right, the gradient treats the statistic as a constant and lacks the term that projects out the direction of x.'
# RMSNorm; the statistic is taken in float32 or wider, whatever comes in.
import torch
from torch import nn

from veriformer.properties import Subject


def inverse_rms(x, eps):
    wide = torch.promote_types(x.dtype, torch.float32)
    h = x.detach().to(wide)
    return torch.rsqrt(h.square().mean(-1, keepdim=True) + eps).to(x.dtype)


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return self.weight * (x * inverse_rms(x, self.eps))


subject = Subject(
    kind="norm",
    name="RMSNorm",
    build=lambda c: RMSNorm(c.d_model),
    forward=lambda m, x: m(x),
    declares={"norm": "rms", "norm_bias": False},
)

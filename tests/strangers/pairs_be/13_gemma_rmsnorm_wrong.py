WHAT = "the inverse RMS is computed under no_grad: the outputs are right, but the gradient with respect to x lacks the term through the statistic, so it isn't the derivative: line 16."
"""RMSNorm of Gemma: the gain is 1 + weight, the arithmetic is in float32 at least."""

import torch
from torch import nn

from veriformer.properties import Subject


class GemmaRMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float = 1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(dim))

    @torch.no_grad()
    def _inv_rms(self, x):
        return torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + self.eps)

    def forward(self, x):
        dtype = x.dtype
        x = x.to(torch.promote_types(dtype, torch.float32))
        # a statistic of the row, one number a token
        inv_rms = self._inv_rms(x)
        out = x * inv_rms * (1.0 + self.weight.to(x.dtype))
        return out.to(dtype)


subject = Subject(
    kind="norm",
    name="Gemma RMSNorm",
    build=lambda c: GemmaRMSNorm(c.d_model),
    forward=lambda m, x: m(x),
    declares={"norm": "rms", "norm_bias": False},
)

"""RMSNorm with its statistics in float32, in the manner of T5, and an epsilon of 1e-8."""

import torch
from torch import nn

from veriformer.properties import Subject

WHAT = "The mean of the squares is taken in float32 but cast back to the input's dtype before epsilon and the root."
CAUSE = (
    "The mean square is rounded to the input's half precision before eps is added: in float16 it overflows for large "
    "tokens (256 and more, so that the output is 0), vanishes for small ones, and eps = 1e-8 is 0 there: a token of "
    "zeros gives 0 * inf = NaN."
)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight"""

    def __init__(self, hidden_size: int, eps: float = 1e-8):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def extra_repr(self) -> str:
        return f"{self.weight.numel()}, eps={self.variance_epsilon}"

    def mean_square(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """In float32 at least: squares of float16 overflow from 256 on."""
        wide = torch.promote_types(hidden_states.dtype, torch.float32)
        return hidden_states.to(wide).pow(2).mean(-1, keepdim=True)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        variance = self.mean_square(hidden_states)
        normed = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return (normed * self.weight).to(hidden_states.dtype)


class RMSNormCastBack(RMSNorm):
    def mean_square(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().mean_square(hidden_states).to(hidden_states.dtype)


def norm(cls):
    return Subject(
        kind="norm",
        name="RMSNorm",
        build=lambda c: cls(c.d_model),
        forward=lambda m, x: m(x),
        declares={"norm": "rms", "half_precision": True},
    )


right = norm(RMSNorm)
wrong = norm(RMSNormCastBack)

"""RMSNorm as a drop-in for half-precision models: statistics in float32, the output in the type of the input."""

import torch
from torch import Tensor, nn

from veriformer.properties import Subject

WHAT = "The input is squared in its own type and widened after, where it has to be widened before it is squared."
CAUSE = (
    "x.pow(2).float() overflows in float16 as soon as a channel exceeds 255 (the mean is inf and the whole token comes out as 0), and small "
    "channels underflow: the upcast to float32 stands one operation too late. float32 inputs are right."
)


def wide(x: Tensor) -> Tensor:
    """At least float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class LlamaRMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * gain, over the last axis."""

    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def mean_square(self, hidden: Tensor) -> Tensor:
        return wide(hidden).pow(2).mean(-1, keepdim=True)

    def forward(self, hidden: Tensor) -> Tensor:
        scale = torch.rsqrt(self.mean_square(hidden) + self.variance_epsilon)
        return (wide(self.weight) * (wide(hidden) * scale)).to(hidden.dtype)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.variance_epsilon}"


class FastRMSNorm(LlamaRMSNorm):
    """One pass less over memory: only the squares are kept wide."""

    def mean_square(self, hidden: Tensor) -> Tensor:
        return wide(hidden.pow(2)).mean(-1, keepdim=True)


right = Subject(
    kind="norm",
    name="llama norm",
    build=lambda c: LlamaRMSNorm(c.d_model),
    forward=lambda m, x: m(x),
    declares={"norm": "rms", "half_precision": True},
)
wrong = Subject(
    kind="norm",
    name="llama norm",
    build=lambda c: FastRMSNorm(c.d_model),
    forward=lambda m, x: m(x),
    declares={"norm": "rms", "half_precision": True},
)

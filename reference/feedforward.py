"""The position-wise feed-forward network."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor, nn
from torch.nn import functional


class FeedForward(nn.Module):
    """W_2 dropout(phi(W_1 x + b_1)) + b_2 (Vaswani et al. 2017, equation 2)."""

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        activation: Callable[[Tensor], Tensor],
        *,
        bias: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.up = nn.Linear(d_model, d_ff, bias=bias)
        self.down = nn.Linear(d_ff, d_model, bias=bias)
        self.activation = activation
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map `x` `[..., D]` to `[..., D]`, each token by itself."""
        return self.down(self.dropout(self.activation(self.up(x))))


class GatedFeedForward(nn.Module):
    """W_2 dropout(phi(W_1 x) * W_3 x) (Shazeer 2020): SwiGLU with phi = SiLU, GEGLU with phi = GELU."""

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        activation: Callable[[Tensor], Tensor],
        *,
        bias: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.gate = nn.Linear(d_model, d_ff, bias=bias)
        self.up = nn.Linear(d_model, d_ff, bias=bias)
        self.down = nn.Linear(d_ff, d_model, bias=bias)
        self.activation = activation
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map `x` `[..., D]` to `[..., D]`, each token by itself."""
        return self.down(self.dropout(self.activation(self.gate(x)) * self.up(x)))


def relu_squared(x: Tensor) -> Tensor:
    """Return max(x, 0)^2 (So et al. 2021)."""
    return functional.relu(x).square()


def quick_gelu(x: Tensor) -> Tensor:
    """Return x sigmoid(1.702 x), an approximation of GELU (Hendrycks & Gimpel 2016, section 2)."""
    return x * (1.702 * x).sigmoid()


gelu_tanh = partial(functional.gelu, approximate="tanh")

FEED_FORWARDS: Mapping[str, Callable[..., nn.Module]] = {
    "relu": partial(FeedForward, activation=functional.relu),
    "relu_squared": partial(FeedForward, activation=relu_squared),
    "gelu": partial(FeedForward, activation=functional.gelu),
    "gelu_tanh": partial(FeedForward, activation=gelu_tanh),
    "quick_gelu": partial(FeedForward, activation=quick_gelu),
    "swiglu": partial(GatedFeedForward, activation=functional.silu),
    "geglu": partial(GatedFeedForward, activation=functional.gelu),
    "geglu_tanh": partial(GatedFeedForward, activation=gelu_tanh),
}
"""Makers of a feed-forward network from (d_model, d_ff, bias=, dropout=), by activation."""

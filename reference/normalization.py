"""Normalization of each token by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn


def _wide(x: Tensor) -> Tensor:
    """Return `x` in float32 at least: in float16 the square of 256 overflows."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class LayerNorm(nn.Module):
    """gamma (x - mean) / sqrt(var + eps) + beta over the channels, with the biased variance (Ba et al. 2016)."""

    def __init__(self, d_model: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d_model))
        self.bias = nn.Parameter(torch.zeros(d_model))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `x` `[..., D]`."""
        wide = _wide(x)
        centred = wide - wide.mean(dim=-1, keepdim=True)
        variance = centred.square().mean(dim=-1, keepdim=True)
        return (self.weight * centred / (variance + self.eps).sqrt() + self.bias).to(x.dtype)


class RMSNorm(nn.Module):
    """gamma x / sqrt(mean(x^2) + eps) over the channels (Zhang & Sennrich 2019)."""

    def __init__(self, d_model: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d_model))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `x` `[..., D]`."""
        wide = _wide(x)
        return (self.weight * wide / (wide.square().mean(dim=-1, keepdim=True) + self.eps).sqrt()).to(x.dtype)


def _no_norm(d_model: int, eps: float) -> nn.Module:
    return nn.Identity()


NORMS: Mapping[str, Callable[[int, float], nn.Module]] = {"layer": LayerNorm, "rms": RMSNorm, "none": _no_norm}
"""Makers of a normalization from (d_model, eps)."""

"""Rotary positions as in the first Llama code: neighbouring channels are one complex number, multiplied by exp(i * t * theta).

Unusual: computed in complex64, or in complex128 for float64, and given back in the input's dtype; angles come from float64.
"""

import torch
from torch import nn

from veriformer.properties import Subject


def apply_rotary_emb(x: torch.Tensor, positions: torch.Tensor, theta: float = 10000.0) -> torch.Tensor:
    dim = x.shape[-1]
    freqs = theta ** -(torch.arange(0, dim, 2, dtype=torch.float64, device=x.device) / dim)
    angles = positions.to(torch.float64).unsqueeze(-1) * freqs
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    freqs_cis = torch.polar(torch.ones_like(angles), angles)
    freqs_cis = freqs_cis.to(torch.complex128 if wide == torch.float64 else torch.complex64)
    x_ = torch.view_as_complex(x.to(wide).reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(x_ * freqs_cis).flatten(-2).type_as(x)


class Rotary(nn.Module):
    def forward(self, x, positions):
        return apply_rotary_emb(x, positions)


COMMON = dict(
    kind="rotary",
    build=lambda c: Rotary(),
    forward=lambda m, x, positions: m(x, positions),
    domain={"d_model": [16, 24, 32], "num_heads": [1, 2, 4]},
)
undeclared = Subject(**COMMON)
declared = Subject(**COMMON, declares={"positions": "rotary", "layout": "interleaved", "base": 10000.0})

"""Llama's rotary positions by complex multiplication, base 500000. Unusual: pairs are neighbouring channels and there is no
sine in the code; right, the complex product turns each pair."""
import torch
from torch import nn
from veriformer.properties import Subject
BASE = 500000.0


class Rotary(nn.Module):
    def forward(s, x, positions):
        K = x.shape[-1]
        inv = BASE ** (-torch.arange(0, K, 2, dtype=torch.float64, device=x.device) / K)
        a = torch.outer(positions.double(), inv)
        turn = torch.polar(torch.ones_like(a), a).to(torch.complex128 if x.dtype == torch.float64 else torch.complex64)
        y = x if x.dtype in (torch.float32, torch.float64) else x.float()
        z = torch.view_as_complex(y.reshape(*x.shape[:-1], K // 2, 2).contiguous())
        return torch.view_as_real(z * turn).flatten(-2).type_as(x)


args = dict(kind="rotary", build=lambda c: Rotary(), forward=lambda m, x, positions: m(x, positions),
            domain={"d_model": [16, 32], "num_heads": [2, 4]})
undeclared = Subject(**args)
declared = Subject(**args, declares={"positions": "rotary", "layout": "interleaved", "base": BASE})

"""Rotary positions by complex multiplication of neighbouring pairs (the original LLaMA form)."""
import torch
from torch import nn
from veriformer.properties import Subject

class Rope(nn.Module):
    def forward(self, x, positions):
        d = x.shape[-1]
        freqs = 1.0 / 10000.0 ** (torch.arange(0, d, 2, dtype=torch.float64, device=x.device) / d)
        angle = torch.outer(positions.double(), freqs)
        cis = torch.polar(torch.ones_like(angle), angle)
        kind = torch.float64 if x.dtype == torch.float64 else torch.float32
        z = torch.view_as_complex(x.to(kind).reshape(*x.shape[:-1], -1, 2).contiguous())
        return torch.view_as_real(z * cis.to(z.dtype)).flatten(-2).type_as(x)

common = dict(kind="rotary", build=lambda c: Rope(), domain={"d_model": [8, 16, 24], "num_heads": [1, 2, 4]}, forward=lambda m, x, positions: m(x, positions))
undeclared = Subject(**common)
declared = Subject(**common, declares={"layout": "interleaved", "base": 10000.0})

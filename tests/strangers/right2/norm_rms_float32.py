"""Llama's RMSNorm: always in float32 inside, cast back before the gain. Unusual: float64 inputs get float32 accuracy;
right, that is what every Llama does (its users run bfloat16)."""
import torch
from torch import nn
from veriformer.properties import Subject


class RMSNorm(nn.Module):
    def __init__(s, d, eps=1e-6):
        super().__init__()
        s.weight, s.eps = nn.Parameter(torch.ones(d)), eps

    def forward(s, x):
        h = x.to(torch.float32)
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + s.eps)
        return s.weight * h.to(x.dtype)


args = dict(kind="norm", build=lambda c: RMSNorm(c.d_model), forward=lambda m, x: m(x))
undeclared = Subject(**args)
declared = Subject(**args, declares={"norm": "rms", "norm_bias": False})

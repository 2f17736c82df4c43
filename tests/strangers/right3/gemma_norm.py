"""Gemma's RMS norm: gain stored as an offset from one, computed in at least float32."""
import torch
from torch import nn
from veriformer.properties import Subject

class GemmaRMSNorm(nn.Module):
    def __init__(self, d, eps=1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(d)), eps

    def forward(self, x):
        y = x if x.dtype == torch.float64 else x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return (y * (1 + self.weight.to(y.dtype))).to(x.dtype)

common = dict(kind="norm", build=lambda c: GemmaRMSNorm(c.d_model), forward=lambda m, x: m(x))
undeclared = Subject(**common)
declared = Subject(**common, declares={"norm": "rms", "norm_bias": False})

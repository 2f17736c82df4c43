"""Sinusoidal table as one sine with a phase of pi/2 in the odd channels. Unusual: no cosine; right, cos a = sin(a + pi/2),
computed in float64 and cast at the end."""
import math
import torch
from torch import nn
from veriformer.properties import Subject


class Table(nn.Module):
    def __init__(s, D):
        super().__init__()
        j = torch.arange(D)
        s.D = D
        s.register_buffer("like", torch.zeros(1), persistent=False)
        s.rate = [10000.0 ** (-2 * (int(i) // 2) / D) for i in j]
        s.phase = [math.pi / 2 * (int(i) % 2) for i in j]

    def forward(s, length):
        kw = dict(dtype=torch.float64, device=s.like.device)
        a = torch.arange(length, **kw)[:, None] * torch.tensor(s.rate, **kw) + torch.tensor(s.phase, **kw)
        return a.sin().to(s.like.dtype)


args = dict(kind="positions", build=lambda c: Table(c.d_model), forward=lambda m, length: m(length))
undeclared = Subject(**args)
declared = Subject(**args, declares={"positions": "sinusoidal", "layout": "interleaved", "base": 10000.0, "beyond_max_len": "works"})

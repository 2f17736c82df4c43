"""A LLaMA layer: RMSNorm, fused gate and up projections, no biases; positions come from elsewhere."""
import math

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


class RMSNorm(nn.Module):
    def __init__(self, d, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))
        self.eps = eps

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class SwiGLU(nn.Module):
    def __init__(self, d, hidden, bad):
        super().__init__()
        self.gate_up, self.down = nn.Linear(d, 2 * hidden, bias=False), nn.Linear(hidden, d, bias=False)
        self.bad = bad

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * (gate if self.bad else up))


class Layer(nn.Module):
    def __init__(self, c, bad):
        super().__init__()
        self.h = c.num_heads
        self.qkv, self.o = nn.Linear(c.d_model, 3 * c.d_model, bias=False), nn.Linear(c.d_model, c.d_model, bias=False)
        self.n1, self.n2, self.ffn = RMSNorm(c.d_model), RMSNorm(c.d_model), SwiGLU(c.d_model, c.d_ff, bad)

    def forward(self, x, attention_mask=None):
        t = x.size(1)
        allowed = torch.ones(t, t, dtype=torch.bool, device=x.device).tril()
        if attention_mask is not None:
            allowed = allowed & attention_mask[:, None, None, :]
        q, k, v = (y.unflatten(-1, (self.h, -1)).transpose(1, 2) for y in self.qkv(self.n1(x)).chunk(3, -1))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, attn_mask=allowed).transpose(1, 2).flatten(2))
        return x + self.ffn(self.n2(x))


def subject(bad):
    return Subject(kind="layer", build=lambda c: Layer(c, bad), forward=lambda m, x, attention_mask=None: m(x, attention_mask), mask_forms=("padding",),
                   declares={"causal": True, "activation": "swiglu", "norm": "rms", "norm_placement": "pre", "residual": True,
                             "bias": False})


right, wrong = subject(False), subject(True)
WHAT = "The SwiGLU multiplies silu(gate) by the gate itself instead of by the up projection, whose half of the weights is dead."
PLACE = "feed-forward (SwiGLU)"

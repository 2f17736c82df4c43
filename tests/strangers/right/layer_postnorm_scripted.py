"""Post-norm encoder layer that is one torch.jit.script module inside, with RMSNorm on queries and keys and a fused bias-GELU.

Unusual: the whole computation is scripted; the Python class around it only turns an absent mask into one of ones. Queries and
keys are normalised per head with a learned gain before the scores.
"""

import math
import warnings

import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject


def bias_gelu(bias: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x = bias + y
    return x * 0.5 * (1.0 + torch.erf(x * 0.7071067811865476))


def rms(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * gain


class ScriptedLayer(nn.Module):
    def __init__(self, d_model: int, num_heads: int, d_ff: int, dropout: float):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = d_model // num_heads
        self.in_proj = nn.Linear(d_model, 3 * d_model)
        self.q_gain = nn.Parameter(torch.ones(self.head_dim))
        self.k_gain = nn.Parameter(torch.ones(self.head_dim))
        self.out_proj = nn.Linear(d_model, d_model)
        self.norm1 = nn.LayerNorm(d_model)
        self.fc1 = nn.Linear(d_model, d_ff, bias=False)
        self.fc1_bias = nn.Parameter(torch.zeros(d_ff))
        self.fc2 = nn.Linear(d_ff, d_model)
        self.norm2 = nn.LayerNorm(d_model)
        self.dropout = dropout

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(x.size(0), x.size(1), self.num_heads, self.head_dim).transpose(1, 2)

    def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        q, k, v = self.in_proj(x).chunk(3, dim=-1)
        q = rms(self.heads(q), self.q_gain)
        k = rms(self.heads(k), self.k_gain)
        scores = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(float(self.head_dim))
        closed = keep.logical_not().unsqueeze(1).unsqueeze(2)
        # a sample of nothing but padding keeps its scores here, so that the softmax is defined
        scores = scores.masked_fill(closed & ~closed.all(dim=3, keepdim=True), -float("inf"))
        weights = torch.softmax(scores, dim=-1).masked_fill(closed, 0.0)
        weights = F.dropout(weights, self.dropout, self.training)
        mixed = torch.matmul(weights, self.heads(v)).transpose(1, 2).reshape(x.shape)
        x = self.norm1(x + F.dropout(self.out_proj(mixed), self.dropout, self.training))
        y = self.fc2(bias_gelu(self.fc1_bias, self.fc1(x)))
        return self.norm2(x + F.dropout(y, self.dropout, self.training))


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch.jit.script is deprecated, and still in use
            self.inner = torch.jit.script(ScriptedLayer(c.d_model, c.num_heads, c.d_ff, c.dropout))

    def forward(self, x, attention_mask=None):
        if attention_mask is None:
            attention_mask = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        return self.inner(x, attention_mask)


COMMON = dict(
    kind="layer",
    build=Layer,
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    mask_forms=("padding",),
)
undeclared = Subject(**COMMON)
declared = Subject(
    **COMMON,
    declares={
        "causal": False,
        "positions": "none",
        "padding_side": "both",
        "query_key_norm": True,
        "norm": "layer",
        "norm_placement": "post",
        "activation": "gelu",
        "bias": True,
    },
)

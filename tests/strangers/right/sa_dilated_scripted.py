"""Dilated bidirectional self-attention: a token sees every second token up to a distance of 6, itself included.

Unusual: the masked softmax is compiled with torch.jit.script; sparse by design. QK-norm (L2, times a learned temperature per
head) replaces the scale.
"""

import warnings

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

STRIDE = 2
REACH = 6

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch.jit.script is deprecated, and still in use

    @torch.jit.script
    def masked_softmax(scores: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        scores = scores.masked_fill(~seen, -float("inf"))
        top = scores.amax(dim=-1, keepdim=True).detach()
        top = top.masked_fill(top == -float("inf"), 0.0)
        powers = torch.exp(scores - top)
        return powers / powers.sum(dim=-1, keepdim=True).clamp(min=1e-30)


class DilatedAttention(nn.Module):
    def __init__(self, dim, heads, dropout):
        super().__init__()
        self.heads = heads
        self.to_qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.to_out = nn.Sequential(nn.Linear(dim, dim), nn.Dropout(dropout))
        self.temperature = nn.Parameter(torch.full((heads, 1, 1), 3.0))

    def forward(self, x, real=None):
        q, k, v = self.to_qkv(x).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (q, k, v))
        q, k = F.normalize(q, dim=-1, eps=1e-6), F.normalize(k, dim=-1, eps=1e-6)
        i = torch.arange(x.size(1), device=x.device)
        apart = (i[:, None] - i[None, :]).abs()
        seen = ((apart % STRIDE == 0) & (apart <= REACH))[None, None]
        if real is not None:
            seen = seen & real[:, None, None, :]
        scores = torch.matmul(q, k.transpose(-1, -2)) * self.temperature
        weights = masked_softmax(scores, seen.expand_as(scores)).to(v.dtype)
        return self.to_out(torch.matmul(weights, v).transpose(1, 2).flatten(2))


COMMON = dict(
    kind="self_attention",
    build=lambda c: DilatedAttention(c.d_model, c.num_heads, c.dropout),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    mask_forms=("padding",),
)
undeclared = Subject(**COMMON)
declared = Subject(
    **COMMON,
    declares={
        "causal": False,
        "sparse": True,
        "query_key_norm": True,
        "positions": "other",
        "padding_side": "both",
        "empty_row": "zeros",
    },
)

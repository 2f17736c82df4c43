"""Prefix-LM (UniLM, T5 in LM mode): the first three real tokens see one another both ways, the rest is causal.

Positions are T5 buckets, one table for all layers. The prefix is counted over real tokens, so a row that is padded on the
left has the same prefix as without padding.
"""

import math

import torch
from torch import nn
import torch.nn.functional as F

from veriformer.properties import Subject

PREFIX = 3
BUCKETS = 16
FARTHEST = 32


def bucket_of(relative: torch.Tensor) -> torch.Tensor:
    """`relative` is key minus query; half of the buckets are for keys behind, half for keys ahead."""
    half = BUCKETS // 2
    exact = half // 2
    offset = (relative > 0).long() * half
    n = relative.abs()
    log_ratio = torch.log(n.clamp(min=1).double() / exact) / math.log(FARTHEST / exact)
    large = (exact + (log_ratio * (half - exact)).long()).clamp(max=half - 1)
    return offset + torch.where(n < exact, n, large)


def prefix_mask(real: torch.Tensor) -> torch.Tensor:
    """[B, T] -> [B, 1, T, T], True where a query may see a key."""
    t = real.size(1)
    index = torch.arange(t, device=real.device)
    past = index.view(1, t, 1) >= index.view(1, 1, t)
    in_prefix = real & (real.long().cumsum(1) <= PREFIX)
    both = in_prefix.unsqueeze(2) & in_prefix.unsqueeze(1)
    return ((past | both) & real.unsqueeze(1)).unsqueeze(1)


class Attention(nn.Module):
    def __init__(self, width, heads, p):
        super().__init__()
        self.heads = heads
        self.to_q = nn.Linear(width, width, bias=False)
        self.to_kv = nn.Linear(width, 2 * width, bias=False)
        self.to_out = nn.Linear(width, width, bias=False)
        self.p = p

    def forward(self, x, bias, visible):
        q = self.to_q(x).unflatten(2, (self.heads, -1)).transpose(1, 2)
        k, v = self.to_kv(x).unflatten(2, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
        logits = q @ k.transpose(2, 3) * q.size(3) ** -0.5 + bias
        logits = logits.masked_fill(visible.logical_not(), torch.finfo(logits.dtype).min)
        w = torch.softmax(logits, 3).masked_fill(visible.logical_not(), 0.0)
        w = F.dropout(w, self.p, self.training)
        return self.to_out((w @ v).transpose(1, 2).flatten(2))


class PrefixLM(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.tokens = nn.Embedding(c.vocab_size, c.d_model)
        self.relative = nn.Embedding(BUCKETS, c.num_heads)
        self.p = c.dropout
        self.attention = nn.ModuleList(Attention(c.d_model, c.num_heads, c.dropout) for _ in range(c.num_layers))
        self.before_attention = nn.ModuleList(nn.RMSNorm(c.d_model, eps=1e-6) for _ in range(c.num_layers))
        self.wi = nn.ModuleList(nn.Linear(c.d_model, c.d_ff, bias=False) for _ in range(c.num_layers))
        self.wo = nn.ModuleList(nn.Linear(c.d_ff, c.d_model, bias=False) for _ in range(c.num_layers))
        self.before_mlp = nn.ModuleList(nn.RMSNorm(c.d_model, eps=1e-6) for _ in range(c.num_layers))
        self.last = nn.RMSNorm(c.d_model, eps=1e-6)
        self.head = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, ids, attention_mask=None):
        real = attention_mask if attention_mask is not None else torch.ones_like(ids, dtype=torch.bool)
        index = torch.arange(ids.size(1), device=ids.device)
        bias = self.relative(bucket_of(index[None, :] - index[:, None])).permute(2, 0, 1)
        visible = prefix_mask(real)
        x = F.dropout(self.tokens(ids), self.p, self.training)
        stack = zip(self.before_attention, self.attention, self.before_mlp, self.wi, self.wo)
        for norm_a, attend, norm_m, wi, wo in stack:
            x = x + F.dropout(attend(norm_a(x), bias, visible), self.p, self.training)
            x = x + F.dropout(wo(F.relu(wi(norm_m(x)))), self.p, self.training)
        return self.head(self.last(x))


COMMON = dict(
    kind="decoder",
    build=PrefixLM,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    mask_forms=("padding",),
)
undeclared = Subject(**COMMON)
declared = Subject(
    **COMMON,
    declares={
        "prefix": PREFIX,
        "positions": "t5",
        "num_buckets": BUCKETS,
        "max_distance": FARTHEST,
        "bidirectional": True,
        "padding_side": "both",
        "norm": "rms",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "relu",
        "bias": False,
        "output_bias": False,
        "tied": False,
    },
)

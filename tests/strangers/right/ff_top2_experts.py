"""Mixture of experts as in Mixtral: each token goes to its two best of four experts, whose shares are made to sum to one.

Unusual: tokens are gathered per expert and scattered back with index_add_; nothing is dropped, so each token's result depends on
that token alone. Where the router is in doubt the function jumps, as every hard routing does.
"""

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject

EXPERTS, TOP = 4, 2


class Expert(nn.Module):
    def __init__(self, d_model, d_ff):
        super().__init__()
        self.w1 = nn.Linear(d_model, d_ff, bias=False)
        self.w2 = nn.Linear(d_ff, d_model, bias=False)
        self.w3 = nn.Linear(d_model, d_ff, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class SparseMoeBlock(nn.Module):
    def __init__(self, d_model, d_ff):
        super().__init__()
        self.gate = nn.Linear(d_model, EXPERTS, bias=False)
        self.experts = nn.ModuleList([Expert(d_model, d_ff) for _ in range(EXPERTS)])

    def forward(self, hidden_states):
        shape = hidden_states.shape
        flat = hidden_states.reshape(-1, shape[-1])
        logits = self.gate(flat)
        weights = F.softmax(logits, dim=1, dtype=torch.promote_types(logits.dtype, torch.float32))
        weights, selected = torch.topk(weights, TOP, dim=-1)
        weights = (weights / weights.sum(dim=-1, keepdim=True)).to(flat.dtype)
        final = torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):
            token, place = torch.where(selected == e)
            if token.numel():
                out = expert(flat[token]) * weights[token, place, None]
                final.index_add_(0, token, out.to(final.dtype))
        return final.reshape(shape)


COMMON = dict(
    kind="feed_forward",
    build=lambda c: SparseMoeBlock(c.d_model, c.d_ff),
    forward=lambda m, x: m(x),
)
undeclared = Subject(**COMMON)
declared = Subject(**COMMON, declares={"activation": "swiglu", "bias": False, "structure": "other"})

"""Attention with a causal flag, aligned for decoding with a cache: the last query sees all keys."""
import math

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


class CausalAttention(nn.Module):
    def __init__(self, bad):
        super().__init__()
        self.bad = bad

    def forward(self, q, k, v, attention_mask=None, causal=False):
        n = q.size(1) // k.size(1)
        k, v = k.repeat_interleave(n, 1), v.repeat_interleave(n, 1)
        t, s = q.size(-2), k.size(-2)
        allowed = torch.ones(t, s, dtype=torch.bool, device=q.device)
        if causal:
            allowed = allowed.tril() if self.bad else allowed.tril(s - t)
        if attention_mask is not None:
            allowed = allowed & (attention_mask[:, None] if attention_mask.dim() == 3 else attention_mask)
        scores = torch.einsum("bhtk,bhsk->bhts", q, k) / math.sqrt(q.size(-1))
        weights = scores.masked_fill(~allowed, torch.finfo(q.dtype).min).softmax(-1).masked_fill(~allowed, 0.0)
        return weights @ v


def subject(bad):
    return Subject(kind="attention", build=lambda c: CausalAttention(bad), forward=lambda m, q, k, v, attention_mask=None, causal=False: m(q, k, v, attention_mask, causal), mask_forms=("pairwise",),
                   declares={"causal_alignment": "bottom-right", "attention_scale": "1/sqrt(d_head)", "empty_row": "zeros",
                             "grouped_queries": True})


right, wrong = subject(False), subject(True)
WHAT = "Where queries and keys differ in number the causal mask is aligned top-left instead of bottom-right as declared: with a cache the last query sees the first keys only."
PLACE = "causal mask (alignment of queries and keys)"

"""Softmax with one more in the denominator ("attention is off by one"), scores capped by 10 tanh(s / 10). Unusual: rows sum
to less than 1; right, a silent sink key of score 0 and value 0 takes the rest. Rows without keys give zeros."""
import torch
from torch import nn
from veriformer.properties import Subject


class QuietAttention(nn.Module):
    def forward(s, q, k, v, mask=None, causal=False):
        T, S = q.shape[2], k.shape[2]
        w = torch.einsum("bhtk,bhsk->bhts", q, k) * q.shape[-1] ** -0.5
        w = 10.0 * torch.tanh(w / 10.0)
        if causal:
            w = w.masked_fill(torch.ones(T, S, dtype=torch.bool, device=q.device).triu(S - T + 1), float("-inf"))
        if mask is not None:
            w = w.masked_fill(~(mask[:, None] if mask.dim() == 3 else mask), float("-inf"))
        top = w.detach().amax(-1, keepdim=True).clamp(min=0)
        e = (w - top).exp()
        return (e / (e.sum(-1, keepdim=True) + (-top).exp())) @ v


args = dict(kind="attention", build=lambda c: QuietAttention(), mask_forms=("pairwise",),
            forward=lambda m, q, k, v, attention_mask=None, causal=False: m(q, k, v, attention_mask, causal))
undeclared = Subject(**args)
declared = Subject(**args, declares={"sink": True, "soft_cap": 10.0, "empty_row": "zeros", "causal_alignment": "bottom-right"})

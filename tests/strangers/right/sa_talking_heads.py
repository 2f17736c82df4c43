"""Talking-heads self-attention (Shazeer 2020): scores are mixed across heads before the softmax and weights after it.

Unusual: after the second mixing a row of weights need not sum to one and may be negative. Masking stands between the first
mixing and the softmax, so a hidden key has weight zero in every head and any mixture of zeros is zero. Head-first loops in
plain Python for the projections.
"""

import torch
import torch.nn as nn

from veriformer.properties import Subject


class TalkingHeads(nn.Module):
    def __init__(self, dim, heads, p):
        super().__init__()
        width = dim // heads
        self.q = nn.ModuleList(nn.Linear(dim, width, bias=False) for _ in range(heads))
        self.k = nn.ModuleList(nn.Linear(dim, width, bias=False) for _ in range(heads))
        self.v = nn.ModuleList(nn.Linear(dim, width, bias=False) for _ in range(heads))
        self.o = nn.Linear(dim, dim, bias=False)
        self.mix_scores = nn.Parameter(torch.eye(heads) + 0.1 * torch.randn(heads, heads))
        self.mix_weights = nn.Parameter(torch.eye(heads) + 0.1 * torch.randn(heads, heads))
        self.scale = width**-0.5
        self.drop = nn.Dropout(p)

    def forward(self, x, real=None):
        scores = torch.stack([q(x) @ k(x).transpose(1, 2) for q, k in zip(self.q, self.k)]) * self.scale  # [h, b, t, s]
        scores = torch.einsum("hbts,hg->gbts", scores, self.mix_scores)
        if real is not None:
            hide = ~real[None, :, None, :]
            scores = torch.where(hide, torch.finfo(scores.dtype).min, scores)
        weights = torch.softmax(scores, dim=3)
        if real is not None:
            weights = torch.where(hide, 0, weights)
        weights = self.drop(torch.einsum("gbts,gh->hbts", weights, self.mix_weights))
        return self.o(torch.cat([w @ v(x) for w, v in zip(weights, self.v)], dim=-1))


COMMON = dict(
    kind="self_attention",
    build=lambda c: TalkingHeads(c.d_model, c.num_heads, c.dropout),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    mask_forms=("padding",),
)
undeclared = Subject(**COMMON)
declared = Subject(
    **COMMON,
    declares={"causal": False, "positions": "none", "padding_side": "both", "bias": False, "empty_row": "zeros"},
)

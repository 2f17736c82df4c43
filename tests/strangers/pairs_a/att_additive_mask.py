import math

import torch
from torch import nn

from veriformer.properties import Subject


WHAT = (
    'A float mask (bias) is added to the raw scores before they are multiplied by 1/sqrt(d_head), so '
    'finite biases are shrunk; boolean masks and -inf are not affected.'
)
PLACE = 'order of the additive mask and the softmax scale'


class BiasedAttention(nn.Module):
    """Takes boolean masks and float masks that are added to the scaled scores."""

    def forward(self, q, k, v, attention_mask=None, causal=False):
        B, H, T, K = q.shape
        rep, S = H // k.size(1), k.size(2)
        if rep > 1:
            k, v = k.repeat_interleave(rep, 1), v.repeat_interleave(rep, 1)
        mask = attention_mask
        if mask is not None:
            mask = mask[None, None] if mask.dim() == 2 else mask[:, None] if mask.dim() == 3 else mask
        scores = q @ k.transpose(-1, -2)
        if mask is not None and mask.is_floating_point():
            scores = scores * K**-0.5 + mask
        else:
            scores = scores * K**-0.5
            if mask is not None:
                scores = scores.masked_fill(~mask, -math.inf)
        if causal:
            past = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
            scores = scores.masked_fill(~past, -math.inf)
        top = scores.detach().amax(-1, keepdim=True)
        e = torch.exp(scores - top.masked_fill(top == -math.inf, 0.0))
        total = e.sum(-1, keepdim=True)
        return (e @ v) / total.masked_fill(total == 0, 1.0)


class BiasedAttention2(nn.Module):
    """Takes boolean masks and float masks that are added to the scaled scores."""

    def forward(self, q, k, v, attention_mask=None, causal=False):
        B, H, T, K = q.shape
        rep, S = H // k.size(1), k.size(2)
        if rep > 1:
            k, v = k.repeat_interleave(rep, 1), v.repeat_interleave(rep, 1)
        mask = attention_mask
        if mask is not None:
            mask = mask[None, None] if mask.dim() == 2 else mask[:, None] if mask.dim() == 3 else mask
        scores = q @ k.transpose(-1, -2)
        if mask is not None and mask.is_floating_point():
            scores = (scores + mask) * K**-0.5
        else:
            scores = scores * K**-0.5
            if mask is not None:
                scores = scores.masked_fill(~mask, -math.inf)
        if causal:
            past = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
            scores = scores.masked_fill(~past, -math.inf)
        top = scores.detach().amax(-1, keepdim=True)
        e = torch.exp(scores - top.masked_fill(top == -math.inf, 0.0))
        total = e.sum(-1, keepdim=True)
        return (e @ v) / total.masked_fill(total == 0, 1.0)


right = Subject(
    kind="attention",
    build=lambda c: BiasedAttention(),
    forward=lambda m, q, k, v, attention_mask=None, causal=False: m(q, k, v, attention_mask, causal),
    declares={"grouped_queries": True, "causal_alignment": "bottom-right", "empty_row": "zeros"},
    mask_forms=("pairwise", "additive"),
)

wrong = Subject(
    kind="attention",
    build=lambda c: BiasedAttention2(),
    forward=lambda m, q, k, v, attention_mask=None, causal=False: m(q, k, v, attention_mask, causal),
    declares={"grouped_queries": True, "causal_alignment": "bottom-right", "empty_row": "zeros"},
    mask_forms=("pairwise", "additive"),
)

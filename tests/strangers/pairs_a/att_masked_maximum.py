import torch
from torch import nn

from veriformer.properties import Subject


WHAT = (
    'The row maximum that stabilises the softmax is taken over all keys, masked ones included, so a '
    'masked key with a very large score makes the exponentials of the allowed keys underflow and the row '
    'comes out as zeros.'
)
PLACE = 'stabilising maximum of the hand-written masked softmax in attention'


def full_mask(mask, causal, T, S, device):
    """Boolean, [T, S] or [B, 1, T, S], True where a query may attend; causal is aligned at the bottom right."""
    if mask is not None:
        mask = mask[None, None] if mask.dim() == 2 else mask[:, None] if mask.dim() == 3 else mask
    if causal:
        past = torch.ones(T, S, dtype=torch.bool, device=device).tril(S - T)
        mask = past if mask is None else mask & past
    return mask


def grow(x, heads):
    """Repeats key-value heads so that there are as many as query heads."""
    return x if x.size(1) == heads else x.repeat_interleave(heads // x.size(1), 1)


class StableAttention(nn.Module):
    """Softmax written out: subtract the maximum, exponentiate, mask, divide."""

    def forward(self, q, k, v, attention_mask=None, causal=False):
        k, v = grow(k, q.size(1)), grow(v, q.size(1))
        mask = full_mask(attention_mask, causal, q.size(2), k.size(2), q.device)
        scores = (q @ k.transpose(-1, -2)) * q.size(-1) ** -0.5
        if mask is not None:
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        e = torch.exp(scores - scores.detach().amax(-1, keepdim=True))
        if mask is not None:
            e = e.masked_fill(~mask, 0.0)
        total = e.sum(-1, keepdim=True)
        return (e @ v) / total.masked_fill(total == 0, 1.0)


class StableAttention2(nn.Module):
    """Softmax written out: subtract the maximum, exponentiate, mask, divide."""

    def forward(self, q, k, v, attention_mask=None, causal=False):
        k, v = grow(k, q.size(1)), grow(v, q.size(1))
        mask = full_mask(attention_mask, causal, q.size(2), k.size(2), q.device)
        scores = (q @ k.transpose(-1, -2)) * q.size(-1) ** -0.5
        e = torch.exp(scores - scores.detach().amax(-1, keepdim=True))
        if mask is not None:
            e = e.masked_fill(~mask, 0.0)
        total = e.sum(-1, keepdim=True)
        return (e @ v) / total.masked_fill(total == 0, 1.0)


right = Subject(
    kind="attention",
    build=lambda c: StableAttention(),
    forward=lambda m, q, k, v, attention_mask=None, causal=False: m(q, k, v, attention_mask, causal),
    declares={"grouped_queries": True, "causal_alignment": "bottom-right", "empty_row": "zeros"},
    mask_forms=("pairwise",),
)

wrong = Subject(
    kind="attention",
    build=lambda c: StableAttention2(),
    forward=lambda m, q, k, v, attention_mask=None, causal=False: m(q, k, v, attention_mask, causal),
    declares={"grouped_queries": True, "causal_alignment": "bottom-right", "empty_row": "zeros"},
    mask_forms=("pairwise",),
)

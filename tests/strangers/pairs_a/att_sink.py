import torch
from torch import nn

from veriformer.properties import Subject


WHAT = (
    'The sink logit is appended as the last column, but after the softmax the first column is dropped '
    'instead of the last, so every value is multiplied by the weight of the next key and the last one by '
    'that of the sink.'
)
PLACE = 'column dropped after the softmax with a learned attention sink'


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


class SinkAttention(nn.Module):
    """One learned logit a head takes part in the softmax and carries no value."""

    def __init__(self, heads):
        super().__init__()
        self.sink = nn.Parameter(torch.zeros(heads))

    def forward(self, q, k, v, attention_mask=None, causal=False):
        B, H, T, K = q.shape
        k, v = grow(k, H), grow(v, H)
        mask = full_mask(attention_mask, causal, T, k.size(2), q.device)
        scores = q @ k.transpose(-1, -2) * K**-0.5
        if mask is not None:
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        sink = self.sink.to(scores.dtype).view(1, H, 1, 1).expand(B, H, T, 1)
        weights = torch.cat([scores, sink], -1).softmax(-1)
        return weights[..., :-1] @ v


class SinkAttention2(nn.Module):
    """One learned logit a head takes part in the softmax and carries no value."""

    def __init__(self, heads):
        super().__init__()
        self.sink = nn.Parameter(torch.zeros(heads))

    def forward(self, q, k, v, attention_mask=None, causal=False):
        B, H, T, K = q.shape
        k, v = grow(k, H), grow(v, H)
        mask = full_mask(attention_mask, causal, T, k.size(2), q.device)
        scores = q @ k.transpose(-1, -2) * K**-0.5
        if mask is not None:
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        sink = self.sink.to(scores.dtype).view(1, H, 1, 1).expand(B, H, T, 1)
        weights = torch.cat([scores, sink], -1).softmax(-1)
        return weights[..., 1:] @ v


right = Subject(
    kind="attention",
    build=lambda c: SinkAttention(c.num_heads),
    forward=lambda m, q, k, v, attention_mask=None, causal=False: m(q, k, v, attention_mask, causal),
    declares={"grouped_queries": True, "causal_alignment": "bottom-right", "empty_row": "zeros", "sink": True},
    mask_forms=("pairwise",),
)

wrong = Subject(
    kind="attention",
    build=lambda c: SinkAttention2(c.num_heads),
    forward=lambda m, q, k, v, attention_mask=None, causal=False: m(q, k, v, attention_mask, causal),
    declares={"grouped_queries": True, "causal_alignment": "bottom-right", "empty_row": "zeros", "sink": True},
    mask_forms=("pairwise",),
)

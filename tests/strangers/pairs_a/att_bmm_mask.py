import torch
from torch import nn

from veriformer.properties import Subject


WHAT = (
    'With heads folded into the batch for bmm, a [B, T, S] mask is expanded by repeat(H, 1, 1) instead of '
    'repeat_interleave(H, 0), so for B > 1 and H > 1 heads are masked by the mask of another sample.'
)
PLACE = 'expansion of a per-sample mask to the folded batch-times-heads axis'


class BmmAttention(nn.Module):
    """Heads are folded into the batch, as in the oldest implementations."""

    def forward(self, q, k, v, attention_mask=None, causal=False):
        B, H, T, K = q.shape
        rep, S = H // k.size(1), k.size(2)
        if rep > 1:
            k, v = k.repeat_interleave(rep, 1), v.repeat_interleave(rep, 1)
        q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
        scores = torch.bmm(q * K**-0.5, k.transpose(1, 2))
        mask = attention_mask
        if mask is not None and mask.dim() == 3:
            mask = mask.repeat_interleave(H, 0)
        if causal:
            past = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
            mask = past if mask is None else mask & past
        if mask is not None:
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        weights = scores.softmax(-1)
        if mask is not None:
            weights = weights.masked_fill(~mask, 0.0)
        return torch.bmm(weights, v).unflatten(0, (B, H))


class BmmAttention2(nn.Module):
    """Heads are folded into the batch, as in the oldest implementations."""

    def forward(self, q, k, v, attention_mask=None, causal=False):
        B, H, T, K = q.shape
        rep, S = H // k.size(1), k.size(2)
        if rep > 1:
            k, v = k.repeat_interleave(rep, 1), v.repeat_interleave(rep, 1)
        q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
        scores = torch.bmm(q * K**-0.5, k.transpose(1, 2))
        mask = attention_mask
        if mask is not None and mask.dim() == 3:
            mask = mask.repeat(H, 1, 1)
        if causal:
            past = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
            mask = past if mask is None else mask & past
        if mask is not None:
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        weights = scores.softmax(-1)
        if mask is not None:
            weights = weights.masked_fill(~mask, 0.0)
        return torch.bmm(weights, v).unflatten(0, (B, H))


right = Subject(
    kind="attention",
    build=lambda c: BmmAttention(),
    forward=lambda m, q, k, v, attention_mask=None, causal=False: m(q, k, v, attention_mask, causal),
    declares={"grouped_queries": True, "causal_alignment": "bottom-right", "empty_row": "zeros"},
    mask_forms=("pairwise",),
)

wrong = Subject(
    kind="attention",
    build=lambda c: BmmAttention2(),
    forward=lambda m, q, k, v, attention_mask=None, causal=False: m(q, k, v, attention_mask, causal),
    declares={"grouped_queries": True, "causal_alignment": "bottom-right", "empty_row": "zeros"},
    mask_forms=("pairwise",),
)

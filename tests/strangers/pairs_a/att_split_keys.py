import math

import torch
from torch import nn

from veriformer.properties import Subject


WHAT = (
    'Split-KV attention computes the partial log-sum-exps in base 2 but merges the splits with exp '
    'instead of exp2, so the splits are weighted wrongly once S exceeds one split of 4 keys.'
)
PLACE = 'merge of the partial results in split-KV (flash-decoding) attention'


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


class SplitKeys(nn.Module):
    """Splits of keys are attended independently, in base 2, and merged by their log-sum-exps."""

    split = 4

    def forward(self, q, k, v, attention_mask=None, causal=False):
        k, v = grow(k, q.size(1)), grow(v, q.size(1))
        S = k.size(2)
        mask = full_mask(attention_mask, causal, q.size(2), S, q.device)
        q = q * (q.size(-1) ** -0.5 * math.log2(math.e))
        outs, lses = [], []
        for start in range(0, S, self.split):
            scores = q @ k[:, :, start : start + self.split].transpose(-1, -2)
            if mask is not None:
                allowed = mask[..., start : start + self.split]
                scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
            top = scores.detach().amax(-1, keepdim=True)
            p = torch.exp2(scores - top)
            if mask is not None:
                p = p.masked_fill(~allowed, 0.0)
            total = p.sum(-1, keepdim=True)
            empty = total == 0
            total = total.masked_fill(empty, 1.0)
            outs.append(p @ v[:, :, start : start + self.split] / total)
            lses.append((top + torch.log2(total)).masked_fill(empty, -math.inf))
        lse = torch.cat(lses, -1)
        highest = lse.detach().amax(-1, keepdim=True)
        share = torch.exp2(lse - highest.masked_fill(highest == -math.inf, 0.0))
        total = share.sum(-1, keepdim=True)
        share = share / total.masked_fill(total == 0, 1.0)
        return sum(share[..., i : i + 1] * out for i, out in enumerate(outs))


class SplitKeys2(nn.Module):
    """Splits of keys are attended independently, in base 2, and merged by their log-sum-exps."""

    split = 4

    def forward(self, q, k, v, attention_mask=None, causal=False):
        k, v = grow(k, q.size(1)), grow(v, q.size(1))
        S = k.size(2)
        mask = full_mask(attention_mask, causal, q.size(2), S, q.device)
        q = q * (q.size(-1) ** -0.5 * math.log2(math.e))
        outs, lses = [], []
        for start in range(0, S, self.split):
            scores = q @ k[:, :, start : start + self.split].transpose(-1, -2)
            if mask is not None:
                allowed = mask[..., start : start + self.split]
                scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
            top = scores.detach().amax(-1, keepdim=True)
            p = torch.exp2(scores - top)
            if mask is not None:
                p = p.masked_fill(~allowed, 0.0)
            total = p.sum(-1, keepdim=True)
            empty = total == 0
            total = total.masked_fill(empty, 1.0)
            outs.append(p @ v[:, :, start : start + self.split] / total)
            lses.append((top + torch.log2(total)).masked_fill(empty, -math.inf))
        lse = torch.cat(lses, -1)
        highest = lse.detach().amax(-1, keepdim=True)
        share = torch.exp(lse - highest.masked_fill(highest == -math.inf, 0.0))
        total = share.sum(-1, keepdim=True)
        share = share / total.masked_fill(total == 0, 1.0)
        return sum(share[..., i : i + 1] * out for i, out in enumerate(outs))


right = Subject(
    kind="attention",
    build=lambda c: SplitKeys(),
    forward=lambda m, q, k, v, attention_mask=None, causal=False: m(q, k, v, attention_mask, causal),
    declares={"grouped_queries": True, "causal_alignment": "bottom-right", "empty_row": "zeros"},
    mask_forms=("pairwise",),
)

wrong = Subject(
    kind="attention",
    build=lambda c: SplitKeys2(),
    forward=lambda m, q, k, v, attention_mask=None, causal=False: m(q, k, v, attention_mask, causal),
    declares={"grouped_queries": True, "causal_alignment": "bottom-right", "empty_row": "zeros"},
    mask_forms=("pairwise",),
)

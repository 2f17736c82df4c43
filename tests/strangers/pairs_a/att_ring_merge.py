import torch
from torch import nn

from veriformer.properties import Subject


WHAT = (
    'Blocks are merged as in ring attention, but the log-sum-exp of each incoming block is detached, so '
    'gradients do not flow through the mixing weights of the blocks: outputs are right, gradients of '
    'queries and keys are wrong once S exceeds one block of 4.'
)
PLACE = 'gradient through the merge weights of block-wise (ring) attention'


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


def block(q, k, v, mask):
    """Attention over one block of keys, and its log-sum-exp."""
    scores = q @ k.transpose(-1, -2) * q.size(-1) ** -0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    lse = torch.logsumexp(scores, -1, keepdim=True)
    p = torch.exp(scores - lse)
    if mask is not None:
        p = p.masked_fill(~mask, 0.0)
    return p @ v, lse


class RingAttention(nn.Module):
    size = 4

    def forward(self, q, k, v, attention_mask=None, causal=False):
        k, v = grow(k, q.size(1)), grow(v, q.size(1))
        S = k.size(2)
        mask = full_mask(attention_mask, causal, q.size(2), S, q.device)
        out = lse = None
        for s in range(0, S, self.size):
            part = None if mask is None else mask[..., s : s + self.size]
            new, new_lse = block(q, k[:, :, s : s + self.size], v[:, :, s : s + self.size], part)
            if out is None:
                out, lse = new, new_lse
                continue
            out = out - torch.sigmoid(new_lse - lse) * (out - new)
            lse = torch.logaddexp(lse, new_lse)
        return out


def block2(q, k, v, mask):
    """Attention over one block of keys, and its log-sum-exp."""
    scores = q @ k.transpose(-1, -2) * q.size(-1) ** -0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    lse = torch.logsumexp(scores, -1, keepdim=True)
    p = torch.exp(scores - lse)
    if mask is not None:
        p = p.masked_fill(~mask, 0.0)
    return p @ v, lse


class RingAttention2(nn.Module):
    size = 4

    def forward(self, q, k, v, attention_mask=None, causal=False):
        k, v = grow(k, q.size(1)), grow(v, q.size(1))
        S = k.size(2)
        mask = full_mask(attention_mask, causal, q.size(2), S, q.device)
        out = lse = None
        for s in range(0, S, self.size):
            part = None if mask is None else mask[..., s : s + self.size]
            new, new_lse = block2(q, k[:, :, s : s + self.size], v[:, :, s : s + self.size], part)
            if out is None:
                out, lse = new, new_lse
                continue
            new_lse = new_lse.detach()
            out = out - torch.sigmoid(new_lse - lse) * (out - new)
            lse = torch.logaddexp(lse, new_lse)
        return out


right = Subject(
    kind="attention",
    build=lambda c: RingAttention(),
    forward=lambda m, q, k, v, attention_mask=None, causal=False: m(q, k, v, attention_mask, causal),
    declares={"grouped_queries": True, "causal_alignment": "bottom-right", "empty_row": "zeros"},
    mask_forms=("pairwise",),
)

wrong = Subject(
    kind="attention",
    build=lambda c: RingAttention2(),
    forward=lambda m, q, k, v, attention_mask=None, causal=False: m(q, k, v, attention_mask, causal),
    declares={"grouped_queries": True, "causal_alignment": "bottom-right", "empty_row": "zeros"},
    mask_forms=("pairwise",),
)

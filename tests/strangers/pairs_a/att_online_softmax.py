import torch
from torch import nn

from veriformer.properties import Subject


WHAT = (
    'The online softmax over key tiles rescales the accumulated numerator when a later tile has a larger '
    'maximum but not the running denominator, so weights no longer sum to one once S exceeds one tile of '
    '4 keys.'
)
PLACE = 'tiled attention kernel, running denominator of the online softmax'


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


class TiledAttention(nn.Module):
    """Online softmax over tiles of keys; no matrix of all weights is kept."""

    tile = 4

    def forward(self, q, k, v, attention_mask=None, causal=False):
        B, H, T, K = q.shape
        S = k.size(2)
        k, v = grow(k, H), grow(v, H)
        mask = full_mask(attention_mask, causal, T, S, q.device)
        q = q * K**-0.5
        top = den = acc = None
        for start in range(0, S, self.tile):
            scores = q @ k[:, :, start : start + self.tile].transpose(-1, -2)
            allowed = None if mask is None else mask[..., start : start + self.tile]
            if allowed is not None:
                scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
            new = scores.detach().amax(-1, keepdim=True)
            if top is not None:
                new = torch.maximum(top, new)
            p = torch.exp(scores - new)
            if allowed is not None:
                p = p.masked_fill(~allowed, 0.0)
            part = p @ v[:, :, start : start + self.tile]
            if top is None:
                den, acc = p.sum(-1, keepdim=True), part
            else:
                shrink = torch.exp(top - new)
                den = den * shrink + p.sum(-1, keepdim=True)
                acc = acc * shrink + part
            top = new
        return acc / den.masked_fill(den == 0, 1.0)


class TiledAttention2(nn.Module):
    """Online softmax over tiles of keys; no matrix of all weights is kept."""

    tile = 4

    def forward(self, q, k, v, attention_mask=None, causal=False):
        B, H, T, K = q.shape
        S = k.size(2)
        k, v = grow(k, H), grow(v, H)
        mask = full_mask(attention_mask, causal, T, S, q.device)
        q = q * K**-0.5
        top = den = acc = None
        for start in range(0, S, self.tile):
            scores = q @ k[:, :, start : start + self.tile].transpose(-1, -2)
            allowed = None if mask is None else mask[..., start : start + self.tile]
            if allowed is not None:
                scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
            new = scores.detach().amax(-1, keepdim=True)
            if top is not None:
                new = torch.maximum(top, new)
            p = torch.exp(scores - new)
            if allowed is not None:
                p = p.masked_fill(~allowed, 0.0)
            part = p @ v[:, :, start : start + self.tile]
            if top is None:
                den, acc = p.sum(-1, keepdim=True), part
            else:
                shrink = torch.exp(top - new)
                den = den + p.sum(-1, keepdim=True)
                acc = acc * shrink + part
            top = new
        return acc / den.masked_fill(den == 0, 1.0)


right = Subject(
    kind="attention",
    build=lambda c: TiledAttention(),
    forward=lambda m, q, k, v, attention_mask=None, causal=False: m(q, k, v, attention_mask, causal),
    declares={"grouped_queries": True, "causal_alignment": "bottom-right", "empty_row": "zeros"},
    mask_forms=("pairwise",),
)

wrong = Subject(
    kind="attention",
    build=lambda c: TiledAttention2(),
    forward=lambda m, q, k, v, attention_mask=None, causal=False: m(q, k, v, attention_mask, causal),
    declares={"grouped_queries": True, "causal_alignment": "bottom-right", "empty_row": "zeros"},
    mask_forms=("pairwise",),
)

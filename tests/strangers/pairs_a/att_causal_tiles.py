import torch
from torch import nn

from veriformer.properties import Subject


WHAT = (
    "The number of key tiles that a causal query tile of 8 rows visits is computed from the tile's first "
    'row instead of its last, so its later rows silently miss their most recent keys (key tiles are 4 '
    'wide).'
)
PLACE = 'causal attention kernel, upper bound of the loop over key tiles'


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


class CausalTiles(nn.Module):
    """Tiles of queries and keys; key tiles that lie wholly in the future are not visited."""

    rows, cols = 8, 4

    def one(self, q, k, v, mask):
        """One tile of queries against the keys it needs."""
        top = q.new_full((*q.shape[:3], 1), torch.finfo(q.dtype).min)
        den = torch.zeros_like(top)
        acc = v.new_zeros(*q.shape[:3], v.size(-1))
        for s in range(0, k.size(2), self.cols):
            scores = q @ k[:, :, s : s + self.cols].transpose(-1, -2)
            if mask is not None:
                allowed = mask[..., s : s + self.cols]
                scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
            new = torch.maximum(top, scores.detach().amax(-1, keepdim=True).to(top.dtype))
            p = torch.exp(scores - new)
            if mask is not None:
                p = p.masked_fill(~allowed, 0.0)
            shrink = torch.exp(top - new)
            den = den * shrink + p.sum(-1, keepdim=True)
            acc = acc * shrink + p @ v[:, :, s : s + self.cols]
            top = new
        return acc / den.masked_fill(den == 0, 1.0)

    def forward(self, q, k, v, attention_mask=None, causal=False):
        H, T, S = q.size(1), q.size(2), k.size(2)
        k, v = grow(k, H), grow(v, H)
        mask = full_mask(attention_mask, causal, T, S, q.device)
        q = q * q.size(-1) ** -0.5
        outs = []
        for t0 in range(0, T, self.rows):
            t1 = min(t0 + self.rows, T)
            seen = S
            if causal:
                last = t1 - 1 + S - T
                seen = max(0, min(S, (last // self.cols + 1) * self.cols))
            tile = None if mask is None else mask[..., t0:t1, :seen]
            outs.append(self.one(q[:, :, t0:t1], k[:, :, :seen], v[:, :, :seen], tile))
        return torch.cat(outs, 2)


class CausalTiles2(nn.Module):
    """Tiles of queries and keys; key tiles that lie wholly in the future are not visited."""

    rows, cols = 8, 4

    def one(self, q, k, v, mask):
        """One tile of queries against the keys it needs."""
        top = q.new_full((*q.shape[:3], 1), torch.finfo(q.dtype).min)
        den = torch.zeros_like(top)
        acc = v.new_zeros(*q.shape[:3], v.size(-1))
        for s in range(0, k.size(2), self.cols):
            scores = q @ k[:, :, s : s + self.cols].transpose(-1, -2)
            if mask is not None:
                allowed = mask[..., s : s + self.cols]
                scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
            new = torch.maximum(top, scores.detach().amax(-1, keepdim=True).to(top.dtype))
            p = torch.exp(scores - new)
            if mask is not None:
                p = p.masked_fill(~allowed, 0.0)
            shrink = torch.exp(top - new)
            den = den * shrink + p.sum(-1, keepdim=True)
            acc = acc * shrink + p @ v[:, :, s : s + self.cols]
            top = new
        return acc / den.masked_fill(den == 0, 1.0)

    def forward(self, q, k, v, attention_mask=None, causal=False):
        H, T, S = q.size(1), q.size(2), k.size(2)
        k, v = grow(k, H), grow(v, H)
        mask = full_mask(attention_mask, causal, T, S, q.device)
        q = q * q.size(-1) ** -0.5
        outs = []
        for t0 in range(0, T, self.rows):
            t1 = min(t0 + self.rows, T)
            seen = S
            if causal:
                last = t0 + S - T
                seen = max(0, min(S, (last // self.cols + 1) * self.cols))
            tile = None if mask is None else mask[..., t0:t1, :seen]
            outs.append(self.one(q[:, :, t0:t1], k[:, :, :seen], v[:, :, :seen], tile))
        return torch.cat(outs, 2)


right = Subject(
    kind="attention",
    build=lambda c: CausalTiles(),
    forward=lambda m, q, k, v, attention_mask=None, causal=False: m(q, k, v, attention_mask, causal),
    declares={"grouped_queries": True, "causal_alignment": "bottom-right", "empty_row": "zeros"},
    mask_forms=("pairwise",),
)

wrong = Subject(
    kind="attention",
    build=lambda c: CausalTiles2(),
    forward=lambda m, q, k, v, attention_mask=None, causal=False: m(q, k, v, attention_mask, causal),
    declares={"grouped_queries": True, "causal_alignment": "bottom-right", "empty_row": "zeros"},
    mask_forms=("pairwise",),
)

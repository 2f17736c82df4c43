import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


WHAT = (
    'Keys are zero-padded up to a multiple of the tile of 8, but without a mask and without causal the '
    'padding columns are not masked, so phantom keys with score 0 take a share of the softmax whenever S '
    'is not a multiple of 8.'
)
PLACE = 'tiled attention kernel, tail of the last key tile'


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


class PaddedTiles(nn.Module):
    """Keys are brought to a multiple of the tile, then all tiles are handled in one batched product."""

    tile = 8

    def forward(self, q, k, v, attention_mask=None, causal=False):
        B, H, T, K = q.shape
        S = k.size(2)
        k, v = grow(k, H), grow(v, H)
        mask = full_mask(attention_mask, causal, T, S, q.device)
        pad = -S % self.tile
        if pad:
            k, v = F.pad(k, (0, 0, 0, pad)), F.pad(v, (0, 0, 0, pad))
            if mask is None:
                mask = torch.ones(T, S, dtype=torch.bool, device=q.device)
            mask = F.pad(mask, (0, pad), value=False)
        n = (S + pad) // self.tile
        kt, vt = k.unflatten(2, (n, self.tile)), v.unflatten(2, (n, self.tile))
        scores = torch.einsum("bhtd,bhnsd->bhnts", q, kt) * K**-0.5
        if mask is not None:
            tiles = mask.unflatten(-1, (n, self.tile)).movedim(-2, -3)
            scores = scores.masked_fill(~tiles, torch.finfo(scores.dtype).min)
        top = scores.detach().amax((2, 4), keepdim=True)
        p = torch.exp(scores - top)
        if mask is not None:
            p = p.masked_fill(~tiles, 0.0)
        den = p.sum((2, 4))[..., None]
        return torch.einsum("bhnts,bhnse->bhte", p, vt) / den.masked_fill(den == 0, 1.0)


class PaddedTiles2(nn.Module):
    """Keys are brought to a multiple of the tile, then all tiles are handled in one batched product."""

    tile = 8

    def forward(self, q, k, v, attention_mask=None, causal=False):
        B, H, T, K = q.shape
        S = k.size(2)
        k, v = grow(k, H), grow(v, H)
        mask = full_mask(attention_mask, causal, T, S, q.device)
        pad = -S % self.tile
        if pad:
            k, v = F.pad(k, (0, 0, 0, pad)), F.pad(v, (0, 0, 0, pad))
            if mask is not None:
                mask = F.pad(mask, (0, pad), value=False)
        n = (S + pad) // self.tile
        kt, vt = k.unflatten(2, (n, self.tile)), v.unflatten(2, (n, self.tile))
        scores = torch.einsum("bhtd,bhnsd->bhnts", q, kt) * K**-0.5
        if mask is not None:
            tiles = mask.unflatten(-1, (n, self.tile)).movedim(-2, -3)
            scores = scores.masked_fill(~tiles, torch.finfo(scores.dtype).min)
        top = scores.detach().amax((2, 4), keepdim=True)
        p = torch.exp(scores - top)
        if mask is not None:
            p = p.masked_fill(~tiles, 0.0)
        den = p.sum((2, 4))[..., None]
        return torch.einsum("bhnts,bhnse->bhte", p, vt) / den.masked_fill(den == 0, 1.0)


right = Subject(
    kind="attention",
    build=lambda c: PaddedTiles(),
    forward=lambda m, q, k, v, attention_mask=None, causal=False: m(q, k, v, attention_mask, causal),
    declares={"grouped_queries": True, "causal_alignment": "bottom-right", "empty_row": "zeros"},
    mask_forms=("pairwise",),
)

wrong = Subject(
    kind="attention",
    build=lambda c: PaddedTiles2(),
    forward=lambda m, q, k, v, attention_mask=None, causal=False: m(q, k, v, attention_mask, causal),
    declares={"grouped_queries": True, "causal_alignment": "bottom-right", "empty_row": "zeros"},
    mask_forms=("pairwise",),
)

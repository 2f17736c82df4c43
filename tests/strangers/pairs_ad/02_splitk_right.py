"""Flash-decoding: the keys are cut into splits, each split is attended to by itself, and a reduction merges them.

Everything is kept in base 2, as on the device, where exp2 is the cheap one.
"""

import math

import torch
import torch.nn.functional as F

from veriformer.properties import Subject

LOG2E = 1.4426950408889634


def _partial(q, k, v, bias):
    """q [b,g,r,t,c], k/v [b,g,n,s,c], bias [b,1,1,t,n,s] -> o [b,g,r,n,t,e] (normalised), lse [b,g,r,n,t] in log2."""
    z = torch.einsum("bgrtc,bgnsc->bgrnts", q, k) * (LOG2E / math.sqrt(q.shape[-1]))
    z = z + bias.permute(0, 1, 2, 4, 3, 5)
    top = z.detach().amax(-1, keepdim=True)
    top = torch.where(top.isinf(), torch.zeros_like(top), top)
    p = torch.exp2(z - top)
    den = p.sum(-1)
    alive = den > 0
    den = torch.where(alive, den, torch.ones_like(den))
    o = torch.einsum("bgrnts,bgnse->bgrnte", p, v) / den[..., None]
    lse = torch.where(alive, torch.log2(den) + top[..., 0], torch.full_like(den, -math.inf))
    return o, lse


def _reduce(o, lse):
    """Merge the splits: each counts by its own sum of exponentials."""
    top = lse.detach().amax(3, keepdim=True)
    top = torch.where(top.isinf(), torch.zeros_like(top), top)
    share = torch.exp2(lse - top)
    total = share.sum(3)
    total = torch.where(total > 0, total, torch.ones_like(total))
    return torch.einsum("bgrnte,bgrnt->bgrte", o, share) / total[..., None]


def split_attention(q, k, v, mask=None, causal=False, splits=3):
    b, h, t, c = q.shape
    g, s = k.shape[1:3]
    dtype = q.dtype
    wide = torch.promote_types(dtype, torch.float32)
    q, k, v = q.to(wide), k.to(wide), v.to(wide)

    allowed = torch.ones(b, 1, t, s, dtype=torch.bool, device=q.device)
    if causal:
        allowed = allowed.tril()
    if mask is not None:
        allowed = allowed & mask
    per = -(-s // splits)
    extra = per * splits - s
    allowed = F.pad(allowed, (0, extra), value=False)
    bias = torch.zeros(allowed.shape, dtype=wide, device=q.device).masked_fill(~allowed, -math.inf)

    o, lse = _partial(
        q.reshape(b, g, h // g, t, c),
        F.pad(k, (0, 0, 0, extra)).reshape(b, g, splits, per, c),
        F.pad(v, (0, 0, 0, extra)).reshape(b, g, splits, per, -1),
        bias.reshape(b, 1, 1, t, splits, per),
    )
    return _reduce(o, lse).reshape(b, h, t, -1).to(dtype)


subject = Subject(
    kind="attention",
    name="split_attention",
    forward=lambda model, q, k, v, attention_mask=None, causal=False: split_attention(q, k, v, attention_mask, causal),
    mask_forms=("pairwise",),
    declares={"empty_row": "zeros", "causal_alignment": "top-left", "grouped_queries": True},
)

"""Flash-decoding: the keys are split, each part is attended to by itself, and the parts are merged."""
import math

import torch

from veriformer.properties import Subject

SPLITS = 3


def part(q, k, v, seen):
    """Attention to one part of the keys: its output, and the weight (as a logarithm) that it has in the merge."""
    score = (torch.einsum("bgrtk,bgsk->bgrts", q, k)).masked_fill(~seen, -math.inf)
    top = score.detach().amax(-1, keepdim=True)
    top = torch.where(top == -math.inf, torch.zeros_like(top), top)
    p = (score - top).exp()
    total = p.sum(-1, keepdim=True)
    none = total == 0
    total = torch.where(none, torch.ones_like(total), total)
    out = torch.einsum("bgrts,bgse->bgrte", p, v) / total
    weight = torch.where(none, torch.full_like(top, -math.inf), top + total.log())
    return out, weight


def merge(parts):
    outs, weights = (torch.stack(t) for t in zip(*parts))
    top = weights.detach().amax(0)
    share = (weights - torch.where(top == -math.inf, torch.zeros_like(top), top)).exp()
    total = share.sum(0)
    return (share * outs).sum(0) / torch.where(total == 0, torch.ones_like(total), total)


def decode_attention(model, q, k, v, attention_mask=None, causal=False):
    B, H, T, K = q.shape
    G, S = k.shape[1:3]
    given = q.dtype
    wide = torch.float32 if given in (torch.float16, torch.bfloat16) else given
    seen = torch.ones(T, S, dtype=torch.bool, device=q.device)
    if causal:
        seen = seen.tril(S - T)
    if attention_mask is not None:
        seen = seen & attention_mask
    seen = seen.expand(B, H, T, S).reshape(B, G, H // G, T, S)
    q = (q.to(wide) / math.sqrt(K)).reshape(B, G, H // G, T, K)
    pieces = zip(k.to(wide).chunk(SPLITS, 2), v.to(wide).chunk(SPLITS, 2), seen.chunk(SPLITS, -1))
    out = merge([part(q, *piece) for piece in pieces])
    return out.reshape(B, H, T, -1).to(given)


subject = Subject(
    kind="attention",
    name="attention by split keys",
    forward=decode_attention,
    mask_forms=("pairwise",),
    declares={"empty_row": "zeros", "causal_alignment": "bottom-right", "grouped_queries": True},
)

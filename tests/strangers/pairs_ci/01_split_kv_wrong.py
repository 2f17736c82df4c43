"""Flash-decoding on the CPU: keys are split, every split keeps its own output and log-sum, a second pass merges them."""
import math

import torch

from veriformer.properties import Subject

SPLIT = 32
LOG2E = math.log2(math.e)


def one_split(q, k, v, seen):
    """q [B,G,R,T,K] already scaled by log2(e)/sqrt(K); all exponentials are base 2, as the hardware has them."""
    s = torch.einsum("bgrtk,bgsk->bgrts", q, k).masked_fill(~seen, -torch.inf)
    top = s.detach().amax(-1, keepdim=True)
    top = torch.where(top == -torch.inf, torch.zeros_like(top), top)
    p = torch.exp2(s - top)
    total = p.sum(-1, keepdim=True)
    dead = total == 0
    total = torch.where(dead, torch.ones_like(total), total)
    out = torch.einsum("bgrts,bgse->bgrte", p, v) / total
    lse = torch.where(dead, torch.full_like(total, -torch.inf), top + torch.log2(total))
    return out, lse


def merge(outs, lses):
    outs, lses = torch.stack(outs), torch.stack(lses)
    top = lses.detach().amax(0)
    top = torch.where(top == -torch.inf, torch.zeros_like(top), top)
    share = torch.exp(lses - top)
    norm = share.sum(0)
    norm = torch.where(norm == 0, torch.ones_like(norm), norm)
    return (share * outs).sum(0) / norm


def decode_attention(_, q, k, v, attention_mask=None, causal=False):
    B, H, T, K = q.shape
    G, S = k.shape[1:3]
    wide = q.dtype if q.dtype == torch.float64 else torch.float32
    seen = torch.ones(T, S, dtype=torch.bool, device=q.device)
    if causal:
        seen = seen.tril(S - T)
    if attention_mask is not None:
        seen = seen & attention_mask
    seen = seen.expand(B, H, T, S).reshape(B, G, H // G, T, S)
    grouped = q.to(wide).reshape(B, G, H // G, T, K) * (LOG2E / math.sqrt(K))
    k, v = k.to(wide), v.to(wide)
    parts = [
        one_split(grouped, k[:, :, i : i + SPLIT], v[:, :, i : i + SPLIT], seen[..., i : i + SPLIT])
        for i in range(0, S, SPLIT)
    ]
    return merge(*zip(*parts)).reshape(B, H, T, v.shape[-1]).to(q.dtype)


subject = Subject(
    kind="attention",
    name="split kv",
    forward=decode_attention,
    mask_forms=("pairwise",),
    declares={"empty_row": "zeros", "causal_alignment": "bottom-right", "grouped_queries": True},
)

WHAT = (
    'The log-sums of the splits are kept in base 2 (log2), but the merge weighs them with exp: splits are mixed with the wrong shares as soon as there are more than 32 keys'
    ' (line 30).'
)

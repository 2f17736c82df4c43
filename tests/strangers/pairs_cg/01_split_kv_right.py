"""Flash-decoding: the keys are cut into splits, each split is reduced alone, a second kernel joins the partial results."""
import math

import torch

from veriformer.properties import Subject

SPLIT = 16


def partial(q, k, v, allowed, scale):
    """Stage one, for one split: its own normalised output and what the join needs to weigh it."""
    s = torch.einsum("bhtk,bhsk->bhts", q, k) * scale
    s = s.masked_fill(~allowed, -math.inf)
    m = s.amax(-1)
    seen = m > -math.inf
    p = torch.exp(s - torch.where(seen, m, 0.0)[..., None])
    l = p.sum(-1)
    l_safe = torch.where(seen, l, 1.0)
    out = torch.einsum("bhts,bhse->bhte", p, v) / l_safe[..., None]
    lse = torch.where(seen, torch.where(seen, m, 0.0) + torch.log(l_safe), -math.inf)
    return out, lse


def join(outs, lses):
    """Stage two."""
    outs, lses = torch.stack(outs), torch.stack(lses)
    top = lses.amax(0)
    top = torch.where(top > -math.inf, top, 0.0)
    w = torch.exp(lses - top)
    total = w.sum(0)
    total = torch.where(total > 0, total, 1.0)
    return (w[..., None] * outs).sum(0) / total[..., None]


def flash_decode(model, q, k, v, attention_mask=None, causal=False):
    B, H, T, K = q.shape
    S, rep = k.shape[2], H // k.shape[1]
    k, v = k.repeat_interleave(rep, 1), v.repeat_interleave(rep, 1)
    allowed = torch.ones(B, H, T, S, dtype=torch.bool, device=q.device)
    if causal:
        allowed = allowed.tril(S - T)
    if attention_mask is not None:
        allowed = allowed & attention_mask
    outs, lses = [], []
    for lo in range(0, S, SPLIT):
        hi = min(lo + SPLIT, S)
        o, lse = partial(q, k[:, :, lo:hi], v[:, :, lo:hi], allowed[..., lo:hi], 1 / math.sqrt(K))
        outs.append(o)
        lses.append(lse)
    return join(outs, lses)


subject = Subject(
    kind="attention",
    name="split-kv decode",
    forward=flash_decode,
    mask_forms=("pairwise",),
    declares={"causal_alignment": "bottom-right", "empty_row": "zeros"},
)

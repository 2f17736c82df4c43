WHAT = 'tiled attention with lazy rescaling: where the rescale of the accumulator is skipped the running maximum moves on all the same, so earlier and later tiles are counted in different units (line 34)'
import torch

from veriformer.properties import Subject

BLOCK = 16
TAU = 4.0  # the accumulator is rescaled only when the maximum grew by more than this


def flash(model, q, k, v, attention_mask=None, causal=False):
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    T, S = q.shape[-2], k.shape[-2]
    allowed = torch.ones(T, S, dtype=torch.bool)
    if causal:
        allowed = allowed.tril(S - T)
    if attention_mask is not None:
        allowed = allowed & attention_mask
    allowed = allowed.expand(*q.shape[:2], T, S)
    high = torch.promote_types(q.dtype, torch.float32)
    qs = q.to(high) * q.shape[-1] ** -0.5

    best = qs.new_full((*q.shape[:-1], 1), -torch.inf)
    total = torch.zeros_like(best)
    acc = qs.new_zeros(*q.shape[:-1], v.shape[-1])
    for start in range(0, S, BLOCK):
        tile = slice(start, min(start + BLOCK, S))
        scores = qs @ k[..., tile, :].to(high).mT
        scores = scores.masked_fill(~allowed[..., tile], -torch.inf)
        with torch.no_grad():
            newest = torch.maximum(best, scores.amax(-1, keepdim=True))
            grow = newest - best > TAU
            alpha = torch.where(grow, (best - newest).exp(), 1.0)
            best = newest
            shift = best.masked_fill(best.isinf(), 0.0)
        p = (scores - shift).exp()
        total = total * alpha + p.sum(-1, keepdim=True)
        acc = acc * alpha + p @ v[..., tile, :].to(high)
    return (acc / total.masked_fill(total == 0, 1.0)).to(q.dtype)


subject = Subject(
    kind="attention",
    forward=flash,
    mask_forms=("pairwise",),
    declares={"empty_row": "zeros", "causal_alignment": "bottom-right", "grouped_queries": True},
)

"""Attention in tiles with a running softmax; tiles that the causal mask hides altogether are not visited."""
import torch

from veriformer.properties import Subject

BQ, BK = 16, 16


def tile(q, k, v, i0, offset, causal, mask):
    T, S = q.shape[-2], k.shape[-2]
    qi = q[..., i0 : i0 + BQ, :] * q.shape[-1] ** -0.5
    rows = torch.arange(i0, min(i0 + BQ, T), device=q.device)
    best = qi.new_full((*qi.shape[:-1], 1), -torch.inf)
    total = torch.zeros_like(best)
    acc = qi.new_zeros(*qi.shape[:-1], v.shape[-1])
    end = min(S, i0 + BQ) if causal else S
    for j0 in range(0, end, BK):
        kj, vj = k[..., j0 : j0 + BK, :], v[..., j0 : j0 + BK, :]
        scores = qi @ kj.transpose(-1, -2)
        if causal:
            cols = torch.arange(j0, j0 + kj.shape[-2], device=q.device)
            scores = scores.masked_fill(cols[None, :] > rows[:, None] + offset, -torch.inf)
        if mask is not None:
            scores = scores.masked_fill(~mask[..., i0 : i0 + BQ, j0 : j0 + BK], -torch.inf)
        new = torch.maximum(best, scores.detach().amax(-1, keepdim=True))
        safe = torch.where(new.isinf(), 0.0, new)
        weights = (scores - safe).exp()
        shrink = (best - safe).exp()
        total = total * shrink + weights.sum(-1, keepdim=True)
        acc = acc * shrink + weights @ vj
        best = new
    return acc / torch.where(total == 0, 1.0, total)


def attend(model, q, k, v, attention_mask=None, causal=False):
    groups = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(groups, dim=1) for t in (k, v))
    T, S = q.shape[-2], k.shape[-2]
    if attention_mask is not None:
        attention_mask = attention_mask.expand(q.shape[0], q.shape[1], T, S)
    return torch.cat([tile(q, k, v, i0, S - T, causal, attention_mask) for i0 in range(0, T, BQ)], dim=-2)


subject = Subject(
    kind="attention",
    name="tiles",
    forward=attend,
    mask_forms=("pairwise",),
    declares={"empty_row": "zeros", "causal_alignment": "bottom-right", "grouped_queries": True},
)

WHAT = 'The last tile of keys to visit is counted as if there were as many keys as queries (line 16): with more keys than queries, tiles that the bottom-right diagonal shows are left out.'

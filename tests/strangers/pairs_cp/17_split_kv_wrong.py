"""Split-KV decoding attention: pieces of the keys are attended to apart, each with its own softmax, and joined at the end."""

import torch

from veriformer.properties import Subject

PIECE = 8


def one_piece(q, k, v, seen):
    scores = torch.einsum("bhtk,bhsk->bhts", q, k) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~seen, -torch.inf)
    top = scores.detach().amax(-1)
    e = (scores - top.masked_fill(top.isinf(), 0.0)[..., None]).exp()
    mass = e.sum(-1)
    out = e @ v / mass.masked_fill(mass == 0, 1.0)[..., None]
    return out, mass, top


def attend(q, k, v, mask=None, causal=False):
    heads, queries, keys = q.shape[1], q.shape[2], k.shape[2]
    k, v = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
    seen = torch.ones(queries, keys, dtype=torch.bool, device=q.device)
    if causal:
        seen = seen.tril(keys - queries)
    if mask is not None:
        seen = seen & mask
    seen = seen.expand(*q.shape[:3], keys)
    parts = [
        one_piece(q, k[:, :, i : i + PIECE], v[:, :, i : i + PIECE], seen[..., i : i + PIECE])
        for i in range(0, keys, PIECE)
    ]
    out, mass, top = (torch.stack(x) for x in zip(*parts))
    best = top.amax(0)
    share = mass
    total = share.sum(0)
    return (out * share[..., None]).sum(0) / total.masked_fill(total == 0, 1.0)[..., None]


subject = Subject(
    kind="attention",
    forward=lambda model, q, k, v, attention_mask=None, causal=False: attend(q, k, v, attention_mask, causal),
    mask_forms=("pairwise",),
    declares={"empty_row": "zeros", "causal_alignment": "bottom-right", "grouped_queries": True},
)

WHAT = "Line 35: pieces are weighed by their sums alone, each of which is relative to the maximum of its own piece."

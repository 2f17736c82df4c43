"""Attention over keys in splits that are computed apart and then combined, as in flash-decoding."""
import torch

from veriformer.properties import Subject

SPLIT = 16


def part(q, k, v, allowed):
    """One split: its normalised output, the largest score and the sum of exponentials."""
    s = ((q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)).masked_fill(~allowed, -torch.inf)
    m = s.amax(-1, keepdim=True)
    p = torch.exp(s - m.masked_fill(m.isinf(), 0.0))
    total = p.sum(-1, keepdim=True)
    return (p @ v) / total.masked_fill(total == 0, 1.0), m, total


def attend(model, q, k, v, attention_mask=None, causal=False):
    H, T, S = q.shape[1], q.shape[2], k.shape[2]
    k, v = (x.repeat_interleave(H // x.shape[1], dim=1) for x in (k, v))
    allowed = torch.ones(T, S, dtype=torch.bool, device=q.device)
    if causal:
        allowed = allowed.tril(S - T)  # the last query sees all keys
    if attention_mask is not None:
        allowed = allowed & attention_mask
    allowed = allowed.expand(*q.shape[:2], T, S)
    parts = [
        part(q, k[:, :, at : at + SPLIT], v[:, :, at : at + SPLIT], allowed[..., at : at + SPLIT])
        for at in range(0, S, SPLIT)
    ]
    out, m, total = (torch.stack(x) for x in zip(*parts))
    top = m.amax(0)
    share = torch.exp(m - top.masked_fill(top.isinf(), 0.0))
    norm = share.sum(0)
    return (share * out).sum(0) / norm.masked_fill(norm == 0, 1.0)


subject = Subject(
    kind="attention",
    forward=attend,
    mask_forms=("pairwise",),
    declares={"causal_alignment": "bottom-right", "empty_row": "zeros", "grouped_queries": True},
)

WHAT = 'Splits are combined by exp of their largest score instead of by exp of their log-sum-exp: the sum of exponentials of each split is left out, so a split counts by its best key and not by its mass; right up to 16 keys (line 33).'

"""Flash-decoding: keys are cut into splits that are attended to apart, and merged by the log of their sums of exponentials."""
import torch

from veriformer.properties import Subject

SPLIT = 16


def partial(q, k, v, allowed, scale):
    """One split: its normalised output and the log of its sum of exponentials (-inf: nothing is visible)."""
    s = torch.einsum("bhtd,bhsd->bhts", q, k) * scale
    s = s.masked_fill(~allowed, -torch.inf)
    m = s.detach().amax(-1)
    m = torch.where(m.isinf(), 0.0, m)
    p = torch.exp(s - m[..., None])
    total = p.sum(-1)
    empty = total == 0
    total = torch.where(empty, 1.0, total)
    o = torch.einsum("bhts,bhse->bhte", p, v) / total[..., None]
    lse = torch.where(empty, -torch.inf, m + total.log())
    return o, lse


def merge(parts):
    outputs, lses = (torch.stack(x) for x in zip(*parts))
    top = lses.detach().amax(0)
    w = torch.exp(lses - torch.where(top.isinf(), 0.0, top))
    norm = w.sum(0)
    w = w / torch.where(norm == 0, 1.0, norm)
    return (w[..., None] * outputs).sum(0)


def attend(model, q, k, v, attention_mask=None, causal=False):
    dtype = q.dtype
    wide = torch.promote_types(dtype, torch.float32)
    q, k, v = q.to(wide), k.to(wide), v.to(wide)
    B, H, T, K = q.shape
    S = k.shape[2]
    k = k.repeat_interleave(H // k.shape[1], dim=1)
    v = v.repeat_interleave(H // v.shape[1], dim=1)
    allowed = torch.ones(T, S, dtype=torch.bool, device=q.device)
    if causal:
        allowed = allowed.tril(S - T)
    if attention_mask is not None:
        allowed = allowed & attention_mask
    allowed = allowed.expand(B, H, T, S)
    parts = [
        partial(q, k[:, :, i : i + SPLIT], v[:, :, i : i + SPLIT], allowed[..., i : i + SPLIT], K**-0.5)
        for i in range(0, S, SPLIT)
    ]
    return merge(parts).to(dtype)


subject = Subject(
    kind="attention",
    name="split-kv attention",
    forward=attend,
    mask_forms=("pairwise",),
    declares={"empty_row": "zeros", "causal_alignment": "bottom-right", "grouped_queries": True},
)

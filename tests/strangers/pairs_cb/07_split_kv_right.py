"""Split-KV attention: parts of the keys by themselves, merged at the end."""
import torch

from veriformer.properties import Subject

PART = 8


def partial(q, k, v, allowed):
    """q [B, G, R, T, K], k [B, G, 1, s, K]: normalised output and how much weight it has."""
    s = torch.where(allowed, q @ k.mT, -torch.inf)
    top = s.amax(-1, keepdim=True)
    finite = torch.where(top.isinf(), 0.0, top)
    e = (s - finite).exp()
    z = e.sum(-1, keepdim=True)
    out = e @ v / torch.where(z > 0, z, 1.0)
    return out, torch.where(z > 0, z, 1.0).log() + top


def merge(outs, logs):
    logs = torch.stack(logs)
    best = logs.amax(0)
    share = (logs - torch.where(best.isinf(), 0.0, best)).exp()
    total = share.sum(0)
    return (share * torch.stack(outs)).sum(0) / torch.where(total > 0, total, 1.0)


def attend(model, q, k, v, attention_mask=None, causal=False):
    B, H, T, K = q.shape
    G, S = k.shape[1:3]
    allowed = torch.ones(T, S, dtype=torch.bool)
    if causal:
        allowed = allowed.tril()
    if attention_mask is not None:
        allowed = allowed & attention_mask
    allowed = allowed.expand(B, H, T, S).unflatten(1, (G, H // G))
    dtype, acc = q.dtype, torch.promote_types(q.dtype, torch.float32)
    q, k, v = q.to(acc), k.to(acc), v.to(acc)
    grouped = (q / K**0.5).unflatten(1, (G, H // G))
    parts = [
        partial(grouped, k[:, :, None, a : a + PART], v[:, :, None, a : a + PART], allowed[..., a : a + PART])
        for a in range(0, S, PART)
    ]
    return merge(*zip(*parts)).flatten(1, 2).to(dtype)


subject = Subject(
    kind="attention",
    name="split-kv",
    forward=attend,
    mask_forms=("pairwise",),
    declares={"grouped_queries": True, "empty_row": "zeros", "causal_alignment": "top-left"},
)

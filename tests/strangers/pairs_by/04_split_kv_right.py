# Flash-decoding. The keys are split, each split gives a normalised partial output, a second pass combines them.
import torch

from veriformer.properties import Subject

SPLIT = 8


def partial(q, k, v, seen):
    s = torch.einsum("bhtk,bhsk->bhts", q, k) * q.shape[-1] ** -0.5
    s = s.masked_fill(~seen, -torch.inf)
    top = s.detach().amax(-1)
    p = torch.exp(s - top.masked_fill(top.isinf(), 0.0)[..., None])
    mass = p.sum(-1)
    out = torch.einsum("bhts,bhse->bhte", p, v) / mass.masked_fill(mass == 0, 1.0)[..., None]
    return out, top, mass


def combine(parts):
    outs, tops, masses = (torch.stack(x) for x in zip(*parts))
    best = tops.amax(0)
    best = best.masked_fill(best.isinf(), 0.0)
    share = torch.exp(tops - best) * masses
    total = share.sum(0)
    share = share / total.masked_fill(total == 0, 1.0)
    return (share[..., None] * outs).sum(0)


def decode_attention(model, q, k, v, attention_mask=None, causal=False):
    B, H, T, _ = q.shape
    S = k.shape[2]
    seen = torch.ones(T, S, dtype=torch.bool, device=q.device)
    if causal:
        seen = seen.tril()
    if attention_mask is not None:
        seen = seen & attention_mask
    seen = seen.expand(B, 1, T, S)
    n = H // k.shape[1]
    k, v = (x.unsqueeze(2).expand(-1, -1, n, -1, -1).flatten(1, 2) for x in (k, v))
    return combine(
        [partial(q, k[:, :, a : a + SPLIT], v[:, :, a : a + SPLIT], seen[..., a : a + SPLIT]) for a in range(0, S, SPLIT)]
    )


subject = Subject(
    kind="attention",
    name="split-KV attention",
    forward=decode_attention,
    mask_forms=("pairwise",),
    declares={"empty_row": "zeros", "causal_alignment": "top-left", "grouped_queries": True},
)

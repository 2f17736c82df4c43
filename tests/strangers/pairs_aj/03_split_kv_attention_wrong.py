WHAT = 'The log-sum-exps of the splits are to base 2 but are merged with exp to base e: more than 32 keys (several splits) get wrong shares; line 40: `w = torch.exp(lses - top)`.'
"""Flash-decoding: keys and values in splits, each with an output and a log-sum-exp of its own, then one merge.

Exponentials are taken to base 2, as the hardware has them; log2(e) is folded into the scale.
"""

import math

import torch

from veriformer.properties import Subject

SPLIT = 32
LOG2E = math.log2(math.e)


def _partial(q, k, v, visible):
    """Attention over one split: its output, and the log2 of the sum of its exponentials."""
    s = torch.einsum("bhtk,bhsk->bhts", q * (LOG2E / math.sqrt(q.size(-1))), k)
    s = s.masked_fill(~visible, -math.inf)
    m = s.amax(dim=-1)
    m_safe = torch.where(m == -math.inf, torch.zeros_like(m), m)
    p = torch.exp2(s - m_safe[..., None])
    l = p.sum(dim=-1)
    l_safe = torch.where(l == 0, torch.ones_like(l), l)
    o = torch.einsum("bhts,bhse->bhte", p, v) / l_safe[..., None]
    lse = torch.where(l == 0, torch.full_like(l, -math.inf), m_safe + torch.log2(l_safe))
    return o, lse


def split_kv_attention(q, k, v, visible):
    parts = [
        _partial(q, k[:, :, a : a + SPLIT], v[:, :, a : a + SPLIT], visible[..., a : a + SPLIT])
        for a in range(0, k.size(2), SPLIT)
    ]
    outs = torch.stack([o for o, _ in parts])
    lses = torch.stack([lse for _, lse in parts])
    top = lses.amax(dim=0)
    top = torch.where(top == -math.inf, torch.zeros_like(top), top)
    w = torch.exp(lses - top)
    total = w.sum(dim=0)
    w = w / torch.where(total == 0, torch.ones_like(total), total)
    return (w[..., None] * outs).sum(dim=0)


def forward(model, q, k, v, attention_mask=None, causal=False):
    rep = q.size(1) // k.size(1)
    if rep > 1:
        k, v = k.repeat_interleave(rep, 1), v.repeat_interleave(rep, 1)
    T, S = q.size(2), k.size(2)
    visible = torch.ones(T, S, dtype=torch.bool, device=q.device)
    if causal:
        visible = visible.tril(S - T)
    if attention_mask is not None:
        visible = visible & attention_mask
    return split_kv_attention(q, k, v, visible.expand(q.size(0), q.size(1), T, S))


subject = Subject(
    kind="attention",
    name="split-KV attention",
    forward=forward,
    mask_forms=("pairwise",),
    declares={"empty_row": "zeros", "causal_alignment": "bottom-right", "grouped_queries": True},
)

import math

import torch

from veriformer.properties import Subject

BLOCK_Q, BLOCK_K = 32, 16


def flash(q, k, v, mask=None, causal=False):
    """Attention by tiles with an online softmax; the causal diagonal ends in the bottom right corner."""
    B, H, T, K = q.shape
    S, E = k.shape[-2], v.shape[-1]
    k, v = (t.repeat_interleave(H // t.shape[1], dim=1) for t in (k, v))
    wide = torch.float32 if q.dtype in (torch.float16, torch.bfloat16) else q.dtype
    q, k, v, dtype = q.to(wide), k.to(wide), v.to(wide), q.dtype
    scale, shift = 1.0 / math.sqrt(K), S - T
    if mask is not None:
        mask = mask.expand(B, H, T, S)
    rows = []
    for q0 in range(0, T, BLOCK_Q):
        q1 = min(q0 + BLOCK_Q, T)
        qi = q[:, :, q0:q1] * scale
        m = qi.new_full((B, H, q1 - q0, 1), -math.inf)
        l = qi.new_zeros(B, H, q1 - q0, 1)
        acc = qi.new_zeros(B, H, q1 - q0, E)
        query = torch.arange(q0, q1, device=q.device)[:, None] + shift
        for k0 in range(0, S, BLOCK_K):
            k1 = min(k0 + BLOCK_K, S)
            if causal and k0 > q1 - 1 + shift:
                break
            s = torch.einsum("bhqd,bhkd->bhqk", qi, k[:, :, k0:k1])
            if causal:
                s = s.masked_fill(torch.arange(k0, k1, device=q.device) > query, -math.inf)
            if mask is not None:
                s = s.masked_fill(~mask[:, :, q0:q1, k0:k1], -math.inf)
            with torch.no_grad():
                m_new = torch.maximum(m, s.amax(-1, keepdim=True))
                safe = torch.where(m_new.isinf(), torch.zeros_like(m_new), m_new)
                alpha = torch.exp(m - safe)
            p = torch.exp(s - safe)
            l = l * alpha + p.sum(-1, keepdim=True)
            acc = acc * alpha + torch.einsum("bhqk,bhkd->bhqd", p, v[:, :, k0:k1])
            m = m_new
        rows.append(acc / torch.where(l == 0, torch.ones_like(l), l))
    return torch.cat(rows, dim=2).to(dtype)


subject = Subject(
    kind="attention",
    name="flash attention in torch",
    forward=lambda model, q, k, v, attention_mask=None, causal=False: flash(q, k, v, attention_mask, causal),
    mask_forms=("pairwise",),
    declares={
        "empty_row": "zeros",
        "causal_alignment": "bottom-right",
        "attention_scale": "1/sqrt(d_head)",
        "grouped_queries": True,
    },
)

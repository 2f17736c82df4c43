WHAT = 'The soft cap is applied to scores that already carry the factor log2(e) of the exp2 trick (line 22: `qk = cap * tanh(qk / cap)` after multiplying by scale * log2e), so that the cap is softcap * ln 2 instead of softcap; log2(e) has to come after the tanh.'
"""Tiled attention in the manner of a Triton kernel: base-2 exponentials, online softmax, logit soft-capping."""
import math

import torch

from veriformer.properties import Subject

LOG2E = 1.4426950408889634
BLOCK_N = 16
SOFTCAP = 3.0


def _attn_fwd(q, k, v, mask, sm_scale, softcap):
    T, S = q.shape[-2], k.shape[-2]
    m_i = q.new_full((*q.shape[:-1], 1), -math.inf)
    l_i = q.new_zeros((*q.shape[:-1], 1))
    acc = q.new_zeros((*q.shape[:-1], v.shape[-1]))
    for start_n in range(0, S, BLOCK_N):
        k_blk = k[..., start_n:start_n + BLOCK_N, :]
        v_blk = v[..., start_n:start_n + BLOCK_N, :]
        qk = (q @ k_blk.transpose(-1, -2)) * (sm_scale * LOG2E)
        qk = softcap * torch.tanh(qk / softcap)
        qk = qk.masked_fill(~mask[..., start_n:start_n + BLOCK_N], -math.inf)
        m_new = torch.maximum(m_i, qk.detach().amax(-1, keepdim=True))
        m_ref = torch.where(m_new == -math.inf, torch.zeros_like(m_new), m_new)
        alpha = torch.exp2(m_i - m_ref)
        p = torch.exp2(qk - m_ref)
        l_i = l_i * alpha + p.sum(-1, keepdim=True)
        acc = acc * alpha + p @ v_blk
        m_i = m_new
    return acc / torch.where(l_i == 0, torch.ones_like(l_i), l_i)


def attention(model, q, k, v, attention_mask=None, causal=False):
    T, S = q.shape[-2], k.shape[-2]
    mask = torch.ones(T, S, dtype=torch.bool, device=q.device)
    if causal:
        mask = mask.tril(S - T)
    if attention_mask is not None:
        mask = mask & attention_mask
    dtype = torch.promote_types(q.dtype, torch.float32)
    out = _attn_fwd(q.to(dtype), k.to(dtype), v.to(dtype), mask, 1.0 / math.sqrt(q.shape[-1]), SOFTCAP)
    return out.to(q.dtype)


subject = Subject(
    kind="attention",
    name="capped flash attention",
    forward=attention,
    mask_forms=("pairwise",),
    declares={"soft_cap": SOFTCAP, "empty_row": "zeros", "causal_alignment": "bottom-right"},
)

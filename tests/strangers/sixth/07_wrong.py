"""Attention with an additive bias, keys in tiles, in base 2: exp2 is one instruction, so log2(e) goes into the scale."""

import math

import torch

from veriformer.properties import Subject

LOG2E = 1.4426950408889634
TILE = 32
NEG_INF = -math.inf


def attn_fwd(q, k, v, bias, causal):
    *lead, T, D = q.shape
    S = k.shape[-2]
    fp = torch.promote_types(q.dtype, torch.float32)
    qk_scale = LOG2E / math.sqrt(D)
    m_i = torch.full((*lead, T, 1), NEG_INF, dtype=fp, device=q.device)
    l_i = torch.zeros((*lead, T, 1), dtype=fp, device=q.device)
    acc = torch.zeros((*lead, T, v.shape[-1]), dtype=fp, device=q.device)
    offs_m = torch.arange(T, device=q.device)[:, None] + (S - T)
    for start in range(0, S, TILE):
        end = min(start + TILE, S)
        qk = torch.matmul(q.to(fp), k[..., start:end, :].to(fp).transpose(-2, -1)) * qk_scale
        if bias is not None:
            qk = qk + bias[..., start:end].to(fp)
        if causal:
            offs_n = torch.arange(start, end, device=q.device)[None, :]
            qk = torch.where(offs_m >= offs_n, qk, torch.full_like(qk, NEG_INF))
        m_ij = torch.maximum(m_i, qk.detach().amax(-1, keepdim=True))
        m_use = m_ij.masked_fill(m_ij == NEG_INF, 0.0)
        p = torch.exp2(qk - m_use)
        alpha = torch.exp2(m_i - m_use)
        l_i = l_i * alpha + p.sum(-1, keepdim=True)
        acc = acc * alpha + torch.matmul(p, v[..., start:end, :].to(fp))
        m_i = m_ij
    return (acc / l_i.masked_fill(l_i == 0, 1.0)).to(q.dtype)


def attention(model, q, k, v, attention_mask=None, causal=False):
    bias = attention_mask
    if bias is not None:
        if bias.dtype == torch.bool:
            bias = torch.zeros(bias.shape, dtype=q.dtype, device=q.device).masked_fill(~bias, NEG_INF)
        if bias.dim() == 3:
            bias = bias.unsqueeze(1)
    return attn_fwd(q, k, v, bias, causal)


subject = Subject(
    kind="attention",
    name="exp2 attention with bias",
    forward=attention,
    mask_forms=("pairwise", "additive"),
    declares={
        "causal_alignment": "bottom-right",
        "empty_row": "zeros",
        "memory": "linear",
        "attention_scale": "1/sqrt(d_head)",
        "half_precision": True,
    },
)

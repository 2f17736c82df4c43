WHAT = "the zero keys that fill up the last block are hidden by the causal comparison or a given mask alone; without either, and S no multiple of 16, each counts exp(0) in the denominator (no bound check behind line 41)"
"""Attention in blocks of keys with an online softmax, after the FlashAttention papers; plain torch, any device."""

import math

import torch
from torch.nn import functional as F

from veriformer.properties import Subject

BLOCK = 16


def flash_attention(q, k, v, mask=None, causal=False):
    B, H, T, K = q.shape
    S = k.shape[2]
    group = H // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)

    out_dtype = q.dtype
    acc_dtype = torch.promote_types(q.dtype, torch.float32)
    q, k, v = q.to(acc_dtype) / math.sqrt(K), k.to(acc_dtype), v.to(acc_dtype)

    # whole blocks only: the tail is filled up with zeros
    tail = -S % BLOCK
    k, v = F.pad(k, (0, 0, 0, tail)), F.pad(v, (0, 0, 0, tail))
    if mask is not None:
        mask = F.pad(mask, (0, tail), value=False)

    rows = torch.arange(T, device=q.device)[:, None]
    m = q.new_full((B, H, T, 1), -math.inf)
    l = q.new_zeros(B, H, T, 1)
    acc = q.new_zeros(B, H, T, v.shape[-1])

    for lo in range(0, S + tail, BLOCK):
        hi = lo + BLOCK
        cols = torch.arange(lo, hi, device=q.device)[None, :]
        s = q @ k[:, :, lo:hi].transpose(-1, -2)
        if mask is not None:
            s = s.masked_fill(~mask[..., lo:hi], -math.inf)
        if causal:
            s = s.masked_fill(cols > rows + (S - T), -math.inf)  # the last query sees the last key, none the tail
        m_new = torch.maximum(m, s.detach().amax(-1, keepdim=True))
        shift = m_new.masked_fill(m_new == -math.inf, 0.0)
        p = torch.exp(s - shift)
        alpha = torch.exp(m - shift)
        l = l * alpha + p.sum(-1, keepdim=True)
        acc = acc * alpha + p @ v[:, :, lo:hi]
        m = m_new

    return (acc / l.masked_fill(l == 0, 1.0)).to(out_dtype)


subject = Subject(
    kind="attention",
    name="flash_attention",
    forward=lambda model, q, k, v, attention_mask=None, causal=False: flash_attention(q, k, v, attention_mask, causal),
    mask_forms=("pairwise",),
    declares={"empty_row": "zeros", "causal_alignment": "bottom-right", "grouped_queries": True},
)

"""FlashAttention-1, the forward of the paper in plain torch: keys go by in tiles of 16."""
import math

import torch

from veriformer.properties import Subject

TILE = 16


def _visible(q, k, attention_mask, causal):
    t, s = q.shape[-2], k.shape[-2]
    seen = torch.ones(t, s, dtype=torch.bool, device=q.device)
    if causal:
        seen = seen.tril(s - t)
    if attention_mask is not None:
        seen = seen & attention_mask
    return seen.expand(q.shape[0], q.shape[1], t, s)


def flash_attention(q, k, v, attention_mask=None, causal=False):
    out_dtype = q.dtype
    work = torch.promote_types(q.dtype, torch.float32)
    q, k, v = q.to(work), k.to(work), v.to(work)
    if k.shape[1] != q.shape[1]:
        k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        v = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    seen = _visible(q, k, attention_mask, causal)
    b, h, t, d = q.shape
    q = q / math.sqrt(d)

    O = q.new_zeros(b, h, t, v.shape[-1])
    l = q.new_zeros(b, h, t, 1)
    m = q.new_full((b, h, t, 1), -math.inf)
    for j in range(0, k.shape[-2], TILE):
        S = q @ k[:, :, j : j + TILE].transpose(-1, -2)
        S = S.masked_fill(~seen[..., j : j + TILE], -math.inf)
        m_block = S.detach().amax(-1, keepdim=True)
        m_new = torch.maximum(m, m_block)
        base = torch.where(m_new.isinf(), 0.0, m_new)
        block_base = torch.where(m_block.isinf(), 0.0, m_block)
        P = torch.exp(S - block_base)
        alpha = torch.exp(m - base)
        beta = torch.exp(m_block - base)
        l = alpha * l + beta * P.sum(-1, keepdim=True)
        O = alpha * O + beta * (P @ v[:, :, j : j + TILE])
        m = m_new
    return (O / torch.where(l == 0, 1.0, l)).to(out_dtype)


subject = Subject(
    kind="attention",
    forward=lambda model, q, k, v, attention_mask=None, causal=False: flash_attention(q, k, v, attention_mask, causal),
    mask_forms=("pairwise",),
    declares={"empty_row": "zeros", "causal_alignment": "bottom-right", "grouped_queries": True},
)

"""FlashAttention in plain torch: tiles of queries by tiles of keys, an online softmax, nothing of T x S ever held."""
import math

import torch

from veriformer.properties import Subject

BLOCK_M = 8
BLOCK_N = 8


def cdiv(a, b):
    return -(-a // b)


def tile(q, k, v, allowed, scale):
    """One tile of queries against its keys, a block at a time. Rows that see nothing give zeros."""
    m = q.new_full(q.shape[:-1], -math.inf)
    l = q.new_zeros(q.shape[:-1])
    acc = q.new_zeros(*q.shape[:-1], v.shape[-1])
    for lo in range(0, k.shape[2], BLOCK_N):
        ks, vs = k[:, :, lo : lo + BLOCK_N], v[:, :, lo : lo + BLOCK_N]
        s = (q @ ks.transpose(-1, -2) * scale).masked_fill(~allowed[..., lo : lo + BLOCK_N], -math.inf)
        m_new = torch.maximum(m, s.detach().amax(-1))
        shift = torch.where(m_new.isinf(), torch.zeros_like(m_new), m_new)
        alpha = torch.exp(m - shift)
        p = torch.exp(s - shift[..., None])
        l = l * alpha + p.sum(-1)
        acc = acc * alpha[..., None] + p @ vs
        m = m_new
    some = (l > 0)[..., None]
    return torch.where(some, acc / torch.where(some, l[..., None], 1.0), 0.0)


def attend(model, q, k, v, attention_mask=None, causal=False):
    B, H, T, K = q.shape
    S = k.shape[2]
    k = k.repeat_interleave(H // k.shape[1], dim=1)
    v = v.repeat_interleave(H // v.shape[1], dim=1)
    allowed = torch.ones(1, 1, T, S, dtype=torch.bool, device=q.device)
    offset = S - T  # the last query sees the last key
    if causal:
        i = torch.arange(T, device=q.device)[:, None]
        j = torch.arange(S, device=q.device)[None]
        allowed = allowed & (j <= i + offset)
    if attention_mask is not None:
        allowed = allowed & attention_mask
    allowed = allowed.broadcast_to(B, H, T, S)

    out = []
    for start in range(0, T, BLOCK_M):
        stop = min(start + BLOCK_M, T)
        hi = S
        if causal:  # blocks above the diagonal are skipped
            hi = min(S, max(0, cdiv(stop + offset, BLOCK_N)) * BLOCK_N)
        out.append(tile(q[:, :, start:stop], k[:, :, :hi], v[:, :, :hi], allowed[:, :, start:stop, :hi], K**-0.5))
    return torch.cat(out, dim=2)


subject = Subject(
    kind="attention",
    name="tiled attention",
    forward=attend,
    mask_forms=("pairwise",),
    declares={"empty_row": "zeros", "causal_alignment": "bottom-right", "grouped_queries": True},
)

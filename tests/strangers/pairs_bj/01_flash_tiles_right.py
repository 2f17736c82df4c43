"""Flash-style forward: blocks of queries by blocks of keys, online softmax, nothing of size T x S is kept."""

import math

import torch

from veriformer.properties import Subject

BLOCK_M = 32  # queries of a program
BLOCK_N = 16  # keys of an iteration


def one_block(q, k, v, row0, offset, mask, causal):
    """q [B,H,m,K] are the rows row0.. of the queries."""
    rows = q.shape[-2]
    keys = k.shape[-2]
    scale = 1.0 / math.sqrt(q.shape[-1])
    acc = q.new_zeros(*q.shape[:-1], v.shape[-1])
    m_i = q.new_full((*q.shape[:-1], 1), -math.inf)
    l_i = q.new_zeros(*q.shape[:-1], 1)
    for n0 in range(0, keys, BLOCK_N):
        last_row = row0 + rows - 1
        if causal and n0 > last_row + offset:
            break  # all further tiles lie above the diagonal
        n1 = min(n0 + BLOCK_N, keys)
        s = (q * scale) @ k[..., n0:n1, :].mT
        if causal:
            i = torch.arange(row0, row0 + rows, device=q.device)[:, None] + offset
            j = torch.arange(n0, n1, device=q.device)[None, :]
            s = s.masked_fill(j > i, -math.inf)
        if mask is not None:
            s = s.masked_fill(~mask[..., row0 : row0 + rows, n0:n1], -math.inf)
        m_new = torch.maximum(m_i, s.detach().amax(-1, keepdim=True))
        safe = m_new.masked_fill(m_new == -math.inf, 0.0)
        p = torch.exp(s - safe)
        alpha = torch.exp(m_i - safe)
        l_i = l_i * alpha + p.sum(-1, keepdim=True)
        acc = acc * alpha + p @ v[..., n0:n1, :]
        m_i = m_new
    return acc / l_i.masked_fill(l_i == 0, 1.0)


def flash(model, q, k, v, attention_mask=None, causal=False):
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    T, S = q.shape[-2], k.shape[-2]
    if attention_mask is not None:
        attention_mask = attention_mask.expand(*attention_mask.shape[:-2], T, S)
    out = [
        one_block(q[..., m0 : m0 + BLOCK_M, :], k, v, m0, S - T, attention_mask, causal)
        for m0 in range(0, T, BLOCK_M)
    ]
    return torch.cat(out, dim=-2)


subject = Subject(
    kind="attention",
    name="flash tiles",
    forward=flash,
    mask_forms=("pairwise",),
    declares={"empty_row": "zeros", "causal_alignment": "bottom-right", "grouped_queries": True},
)

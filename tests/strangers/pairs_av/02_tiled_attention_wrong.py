WHAT = "the causal skip compares the tile of keys with the first query of the tile of queries and not with its last: a key tile that begins inside a query tile is left out, although later queries of it see those keys (line 32)"
"""Flash-style attention: tiles of queries and keys, online softmax, grouped heads, no repeat of K and V."""
import math

import torch

from veriformer.properties import Subject

BLOCK_M, BLOCK_N = 16, 8


def flash(q, k, v, mask=None, causal=False):
    B, H, T, K = q.shape
    G, S, E = v.shape[1:]
    offset = S - T  # bottom-right
    q = q.reshape(B, G, H // G, T, K) * (1.0 / math.sqrt(K))
    k, v = k.unsqueeze(2), v.unsqueeze(2)
    rows = torch.arange(T, device=q.device)
    cols = torch.arange(S, device=q.device)
    if mask is not None:
        mask = mask.expand(B, mask.shape[1], T, S)
        mask = mask.unsqueeze(2) if mask.shape[1] == 1 else mask.reshape(B, G, H // G, T, S)

    tiles = []
    for m0 in range(0, T, BLOCK_M):
        m1 = min(m0 + BLOCK_M, T)
        qt = q[..., m0:m1, :]
        acc = qt.new_zeros(B, G, H // G, m1 - m0, E)
        l_i = qt.new_zeros(B, G, H // G, m1 - m0, 1)
        m_i = torch.full_like(l_i, -torch.inf)
        for n0 in range(0, S, BLOCK_N):
            if causal and n0 > m0 + offset:
                break  # the whole tile lies above the diagonal
            n1 = min(n0 + BLOCK_N, S)
            s = qt @ k[..., n0:n1, :].transpose(-1, -2)
            if causal:
                s = s.masked_fill(cols[n0:n1] > rows[m0:m1, None] + offset, -torch.inf)
            if mask is not None:
                s = s.masked_fill(~mask[..., m0:m1, n0:n1], -torch.inf)
            m_new = torch.maximum(m_i, s.detach().amax(-1, keepdim=True))
            base = m_new.masked_fill(m_new == -torch.inf, 0.0)
            p = torch.exp(s - base)
            alpha = torch.exp(m_i - base)
            l_i = l_i * alpha + p.sum(-1, keepdim=True)
            acc = acc * alpha + p @ v[..., n0:n1, :]
            m_i = m_new
        tiles.append(acc / l_i.masked_fill(l_i == 0, 1.0))
    return torch.cat(tiles, dim=-2).reshape(B, H, T, E)


def forward(model, q, k, v, attention_mask=None, causal=False):
    if attention_mask is not None:
        while attention_mask.dim() < 4:
            attention_mask = attention_mask.unsqueeze(0 if attention_mask.dim() == 2 else 1)
    return flash(q, k, v, attention_mask, causal)


subject = Subject(
    kind="attention",
    name="tiled attention",
    forward=forward,
    mask_forms=("pairwise",),
    declares={"grouped_queries": True, "causal_alignment": "bottom-right", "empty_row": "zeros"},
)

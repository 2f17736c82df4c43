"""Tiled attention, 16 x 16, with a running maximum and sum. Causal tiles above the diagonal are not computed."""
import torch

from veriformer.properties import Subject

TILE = 16


def tiled_attention(q, k, v, mask=None, causal=False):
    T, S = q.shape[-2], k.shape[-2]
    given = q.dtype
    q, k, v = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k, v))
    offset = S - T  # the last query sees the last key
    scale = q.shape[-1] ** -0.5
    if mask is not None:
        mask = mask.expand(*q.shape[:-1], S)
    rows = []
    for i0 in range(0, T, TILE):
        i1 = min(i0 + TILE, T)
        qi = q[..., i0:i1, :] * scale
        m = torch.full((*qi.shape[:-1], 1), -torch.inf, dtype=q.dtype, device=q.device)
        l = torch.zeros_like(m)
        acc = torch.zeros(*qi.shape[:-1], v.shape[-1], dtype=q.dtype, device=q.device)
        t = torch.arange(i0, i1, device=q.device)[:, None]
        for j0 in range(0, S, TILE):
            if causal and j0 > i1 - 1 + offset:
                break
            j1 = min(j0 + TILE, S)
            s = qi @ k[..., j0:j1, :].transpose(-1, -2)
            if causal:
                s = s.masked_fill(torch.arange(j0, j1, device=q.device) > t + offset, -torch.inf)
            if mask is not None:
                s = s.masked_fill(~mask[..., i0:i1, j0:j1], -torch.inf)
            m_new = torch.maximum(m, s.detach().amax(-1, keepdim=True))
            pivot = torch.where(m_new == -torch.inf, torch.zeros_like(m_new), m_new)
            alpha, p = torch.exp(m - pivot), torch.exp(s - pivot)
            l = l * alpha + p.sum(-1, keepdim=True)
            acc = acc * alpha + p @ v[..., j0:j1, :]
            m = m_new
        rows.append(acc / torch.where(l == 0, torch.ones_like(l), l))
    return torch.cat(rows, dim=-2).to(given)


subject = Subject(
    kind="attention",
    name="tiled attention",
    forward=lambda model, q, k, v, attention_mask=None, causal=False: tiled_attention(q, k, v, attention_mask, causal),
    mask_forms=("pairwise",),
    declares={"empty_row": "zeros", "causal_alignment": "bottom-right", "grouped_queries": False},
)

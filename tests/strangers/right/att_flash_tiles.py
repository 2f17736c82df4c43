"""A flash-attention-like kernel in plain torch: tiles of 3 queries by 5 keys, powers of two, tiles above the diagonal skipped.

Unusual: exp(x) is exp2(x * log2(e)), with the factor put into the scale; the running statistics are those of base 2. The mask
may also be additive. Causal alignment is at the bottom right, so with more queries than keys the first queries see nothing
and give zeros.
"""

import math

import torch

from veriformer.properties import Subject

ROWS, COLUMNS = 3, 5
LOG2E = math.log2(math.e)


def as_bias(mask, q):
    """bool or float, [T, S], [B, T, S] or [B, H, T, S] -> a float bias in units of base 2, four-dimensional."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill(~mask, float("-inf"))
    while mask.dim() < 4:
        mask = mask.unsqueeze(0 if mask.dim() == 2 else 1)
    return mask * LOG2E


def one_tile(q_tile, k_tile, v_tile, bias, hidden, state):
    s = q_tile @ k_tile.mT
    if bias is not None:
        s = s + bias
    if hidden is not None:
        s = s.masked_fill(hidden, float("-inf"))
    m, l, acc = state
    m_new = torch.maximum(m, s.detach().amax(-1, keepdim=True))
    base = torch.where(m_new.isneginf(), torch.zeros_like(m_new), m_new)
    p = torch.exp2(s - base)
    alpha = torch.exp2(m - base)
    return m_new, l * alpha + p.sum(-1, keepdim=True), acc * alpha + p @ v_tile


def flash(q, k, v, attention_mask=None, causal=False):
    (b, h, t, d), (g, s) = q.shape, k.shape[1:3]
    if g != h:
        k, v = k.repeat_interleave(h // g, 1), v.repeat_interleave(h // g, 1)
    bias = as_bias(attention_mask, q)
    q = q * (LOG2E / math.sqrt(d))
    offset = s - t  # query i may see keys up to i + offset
    outputs = []
    for i in range(0, t, ROWS):
        q_tile = q[:, :, i : i + ROWS]
        r = q_tile.size(2)
        state = (
            q.new_full((b, h, r, 1), float("-inf")),
            q.new_zeros(b, h, r, 1),
            q.new_zeros(b, h, r, v.size(-1)),
        )
        for j in range(0, s, COLUMNS):
            if causal and j > i + r - 1 + offset:
                break
            n = min(COLUMNS, s - j)
            hidden = None
            if causal and j + n - 1 > i + offset:  # the tile touches the diagonal
                rows = torch.arange(i, i + r, device=q.device)[:, None] + offset
                hidden = torch.arange(j, j + n, device=q.device)[None] > rows
            part = None if bias is None else bias[..., i : i + r, j : j + n]
            state = one_tile(q_tile, k[:, :, j : j + n], v[:, :, j : j + n], part, hidden, state)
        _, l, acc = state
        empty = l == 0
        outputs.append((acc / l.masked_fill(empty, 1.0)).masked_fill(empty, 0.0))
    return torch.cat(outputs, dim=2)


class Flash(torch.nn.Module):
    forward = staticmethod(flash)


COMMON = dict(
    kind="attention",
    build=lambda c: Flash(),
    forward=lambda m, q, k, v, attention_mask=None, causal=False: m(q, k, v, attention_mask, causal),
    mask_forms=("pairwise", "additive"),
)
undeclared = Subject(**COMMON)
declared = Subject(
    **COMMON,
    declares={
        "empty_row": "zeros",
        "causal_alignment": "bottom-right",
        "attention_scale": "1/sqrt(d_head)",
        "grouped_queries": True,
    },
)

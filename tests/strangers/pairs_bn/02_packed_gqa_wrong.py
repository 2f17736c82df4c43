WHAT = 'the rows of packed query heads are ordered [group, time], but the causal mask recovers the time of a row as row // ratio instead of row % t_q: with fewer key-value heads than heads the causal mask is stretched, some queries see the future and others not their past (line 24)'
"""Decode-style attention: the query heads of one group are packed into the rows of one product."""

import torch

from veriformer.properties import Subject


def packed_gqa(model, q, k, v, attention_mask=None, causal=False):
    batch, heads, t_q, width = q.shape
    kv_heads, t_k = k.shape[1], k.shape[2]
    ratio = heads // kv_heads
    out_dtype = q.dtype
    compute = torch.float32 if out_dtype in (torch.float16, torch.bfloat16) else out_dtype
    q, k, v = q.to(compute), k.to(compute), v.to(compute)

    packed = q.reshape(batch, kv_heads, ratio * t_q, width)
    scores = torch.matmul(packed, k.transpose(2, 3)).mul(width**-0.5)

    visible = torch.ones(ratio * t_q, t_k, dtype=torch.bool, device=q.device)
    if causal:
        row = torch.arange(ratio * t_q, device=q.device)[:, None]
        col = torch.arange(t_k, device=q.device)[None, :]
        visible = col <= row // ratio + (t_k - t_q)
    visible = visible[None, None]
    if attention_mask is not None:
        visible = visible & attention_mask.repeat(1, 1, ratio, 1)

    scores = scores.masked_fill(~visible, float("-inf"))
    top = scores.detach().amax(-1, keepdim=True)
    weights = (scores - top.masked_fill(top == float("-inf"), 0.0)).exp()
    total = weights.sum(-1, keepdim=True)
    weights = weights / total.masked_fill(total == 0, 1.0)
    out = torch.matmul(weights, v)
    return out.reshape(batch, heads, t_q, v.shape[-1]).to(out_dtype)


subject = Subject(
    kind="attention",
    name="packed GQA",
    forward=packed_gqa,
    mask_forms=("pairwise",),
    declares={"empty_row": "zeros", "causal_alignment": "bottom-right", "grouped_queries": True},
)

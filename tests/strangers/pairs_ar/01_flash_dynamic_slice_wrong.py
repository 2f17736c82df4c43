WHAT = 'the last, partial key block: dynamic_slice moves its start back so that it overlaps the block before, and the overlapping keys are not masked (the line `seen = seen & (arange >= block)` after `seen = allowed[...]` is missing): keys are counted twice when S > 16 is no multiple of 16'
"""Blockwise attention, ported from a JAX kernel (lax.fori_loop over key blocks, lax.dynamic_slice inside)."""
import math

import torch

from veriformer.properties import Subject

BLOCK = 16


def dynamic_slice(x, start, size):
    """As jax.lax.dynamic_slice on axis -2: a start that would run over the end is moved back."""
    start = max(0, min(start, x.shape[-2] - size))
    return x.narrow(-2, start, size), start


def flash(q, k, v, allowed):
    wide = torch.float32 if q.dtype in (torch.float16, torch.bfloat16) else q.dtype
    out_dtype = q.dtype
    q, k, v = q.to(wide), k.to(wide), v.to(wide)
    keys = k.shape[-2]
    size = min(BLOCK, keys)
    best = q.new_full((*q.shape[:-1], 1), -torch.inf)
    total = torch.zeros_like(best)
    acc = q.new_zeros((*q.shape[:-1], v.shape[-1]))
    for block in range(0, keys, size):
        k_j, start = dynamic_slice(k, block, size)
        v_j, _ = dynamic_slice(v, block, size)
        seen = allowed[..., start : start + size]
        s = q @ k_j.transpose(-1, -2) / math.sqrt(q.shape[-1])
        s = s.masked_fill(~seen, -torch.inf)
        new = torch.maximum(best, s.detach().amax(-1, keepdim=True))
        shift = torch.where(new.isinf(), torch.zeros_like(new), new)
        p = torch.exp(s - shift)
        alpha = torch.exp(best - shift)
        total = total * alpha + p.sum(-1, keepdim=True)
        acc = acc * alpha + p @ v_j
        best = new
    return (acc / torch.where(total == 0, torch.ones_like(total), total)).to(out_dtype)


def attend(model, q, k, v, attention_mask=None, causal=False):
    queries, keys = q.shape[-2], k.shape[-2]
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    allowed = torch.ones(queries, keys, dtype=torch.bool, device=q.device)
    if causal:
        allowed = allowed.tril(keys - queries)
    if attention_mask is not None:
        allowed = allowed & attention_mask
    return flash(q, k, v, allowed)


subject = Subject(
    kind="attention",
    name="blockwise attention",
    forward=attend,
    mask_forms=("pairwise",),
    declares={"empty_row": "zeros", "causal_alignment": "bottom-right", "grouped_queries": True},
)

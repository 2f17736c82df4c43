"""Attention by blocks of keys with an online softmax: never more than T x BLOCK scores at a time."""

import torch

from veriformer.properties import Subject

BLOCK = 16


def tiled_attention(q, k, v, attention_mask=None, causal=False):
    dtype = q.dtype
    if dtype in (torch.float16, torch.bfloat16):
        q, k, v = q.float(), k.float(), v.float()
    batch, heads, queries, width = q.shape
    groups, keys = k.shape[1], k.shape[2]
    k = k.repeat_interleave(heads // groups, dim=1)
    v = v.repeat_interleave(heads // groups, dim=1)

    allowed = torch.ones(queries, keys, dtype=torch.bool, device=q.device)
    if causal:
        allowed = allowed.tril(keys - queries)
    if attention_mask is not None:
        allowed = allowed & attention_mask

    q = q * width**-0.5
    best = q.new_full((batch, heads, queries, 1), torch.finfo(q.dtype).min)
    total = q.new_zeros((batch, heads, queries, 1))
    out = q.new_zeros((batch, heads, queries, v.shape[-1]))
    for start in range(0, keys, BLOCK):
        block = slice(start, min(start + BLOCK, keys))
        scores = q @ k[:, :, block].transpose(-1, -2)
        scores = scores.masked_fill(~allowed[..., block], float("-inf"))
        previous = best.clone()
        best.copy_(torch.maximum(best, scores.detach().amax(dim=-1, keepdim=True)))
        shrink = torch.exp(previous - best)
        weights = torch.exp(scores - best)
        total = total * shrink + weights.sum(dim=-1, keepdim=True)
        out = out * shrink + weights @ v[:, :, block]
    return (out / torch.where(total == 0, torch.ones_like(total), total)).to(dtype)


subject = Subject(
    kind="attention",
    name="tiled attention",
    forward=lambda model, q, k, v, attention_mask=None, causal=False: tiled_attention(q, k, v, attention_mask, causal),
    mask_forms=("pairwise",),
    declares={"empty_row": "zeros", "causal_alignment": "bottom-right", "grouped_queries": True},
)

"""Attention by tiles of queries and keys with an online softmax; grouped key-value heads; causal is bottom-right."""
import math

import torch

from veriformer.properties import Subject

TILE = 8


def tiled_attention(q, k, v, attention_mask=None, causal=False):
    dtype = q.dtype
    if dtype in (torch.float16, torch.bfloat16):
        q, k, v = q.float(), k.float(), v.float()
    batch, heads, queries, width = q.shape
    keys = k.shape[2]
    group = heads // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    q = q / math.sqrt(width)
    offset = keys - queries  # the last query stands on the last key
    rows = torch.arange(queries, device=q.device)[:, None] + offset
    columns = torch.arange(keys, device=q.device)[None, :]
    if attention_mask is not None:
        attention_mask = attention_mask.expand(batch, heads, queries, keys)

    outputs = []
    for first in range(0, queries, TILE):
        stop = min(first + TILE, queries)
        q_tile = q[:, :, first:stop]
        best = q.new_full((batch, heads, stop - first), -torch.inf)
        total = q.new_zeros(batch, heads, stop - first)
        mixed = q.new_zeros(batch, heads, stop - first, v.shape[-1])
        for start in range(0, keys, TILE):
            if causal and start > stop - 1 + offset:
                break
            end = min(start + TILE, keys)
            scores = q_tile @ k[:, :, start:end].transpose(-1, -2)
            if causal:
                scores = scores.masked_fill(columns[:, start:end] > rows[first:stop], -torch.inf)
            if attention_mask is not None:
                scores = scores.masked_fill(~attention_mask[:, :, first:stop, start:end], -torch.inf)
            peak = torch.maximum(best, scores.detach().amax(-1))
            shift = peak.masked_fill(peak == -torch.inf, 0.0)
            fade = (best - shift).exp()
            weights = (scores - shift.unsqueeze(-1)).exp()
            total = total * fade + weights.sum(-1)
            mixed = mixed * fade.unsqueeze(-1) + weights @ v[:, :, start:end]
            best = peak
        empty = total == 0
        outputs.append(mixed / total.masked_fill(empty, 1.0).unsqueeze(-1))
    return torch.cat(outputs, dim=2).to(dtype)


subject = Subject(
    kind="attention",
    name="tiled attention",
    forward=lambda model, q, k, v, attention_mask=None, causal=False: tiled_attention(q, k, v, attention_mask, causal),
    mask_forms=("pairwise",),
    declares={"empty_row": "zeros", "causal_alignment": "bottom-right", "grouped_queries": True},
)

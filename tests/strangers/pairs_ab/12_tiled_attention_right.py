"""Attention in tiles with an online softmax (after FlashAttention); causal tiles that hold nothing are skipped."""

import math

import torch

from veriformer.properties import Subject

BLOCK_M = 4  # queries in a tile
BLOCK_N = 2  # keys in a tile


def tiled_attention(q, k, v, attention_mask=None, causal=False):
    B, H, T, K = q.shape
    G, S = k.shape[1], k.shape[2]
    k, v = k.repeat_interleave(H // G, dim=1), v.repeat_interleave(H // G, dim=1)
    kind = torch.float32 if q.dtype in (torch.float16, torch.bfloat16) else q.dtype
    q, k, v, given = q.to(kind), k.to(kind), v.to(kind), q.dtype
    scale = 1.0 / math.sqrt(K)
    offset = S - T  # the last query sees the last key

    tiles = []
    for m0 in range(0, T, BLOCK_M):
        m1 = min(m0 + BLOCK_M, T)
        rows = torch.arange(m0, m1, device=q.device)[:, None]
        acc = q.new_zeros(B, H, m1 - m0, v.shape[-1])
        total = q.new_zeros(B, H, m1 - m0, 1)
        best = q.new_full((B, H, m1 - m0, 1), float("-inf"))
        for n0 in range(0, S, BLOCK_N):
            n1 = min(n0 + BLOCK_N, S)
            if causal and n0 > m1 - 1 + offset:
                break  # this tile and those behind it lie in the future
            s = q[:, :, m0:m1] @ k[:, :, n0:n1].transpose(-1, -2) * scale
            if causal:
                cols = torch.arange(n0, n1, device=q.device)[None, :]
                s = s.masked_fill(cols > rows + offset, float("-inf"))
            if attention_mask is not None:
                s = s.masked_fill(~attention_mask[..., m0:m1, n0:n1], float("-inf"))
            new = torch.maximum(best, s.detach().amax(-1, keepdim=True))
            safe = new.masked_fill(new.isinf(), 0.0)
            p = torch.exp(s - safe)
            carry = torch.exp(best - safe)
            total = total * carry + p.sum(-1, keepdim=True)
            acc = acc * carry + p @ v[:, :, n0:n1]
            best = new
        tiles.append(acc / total.masked_fill(total == 0, 1.0))
    return torch.cat(tiles, dim=2).to(given)


subject = Subject(
    kind="attention",
    name="attention in tiles",
    build=lambda c: tiled_attention,
    forward=lambda model, q, k, v, attention_mask=None, causal=False: model(q, k, v, attention_mask, causal),
    declares={"grouped_queries": True, "empty_row": "zeros", "causal_alignment": "bottom-right"},
)

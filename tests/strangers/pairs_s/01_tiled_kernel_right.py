"""Attention by tiles: the loops of a fused kernel in plain torch, one pass over tiles of keys for a block of queries."""

import torch

from veriformer.properties import Subject

BLOCK_Q, BLOCK_K = 32, 16


def cdiv(a, b):
    return -(-a // b)


def one_block(q, k, v, allowed, q0, shift, causal):
    """All keys for the queries q0 .. q0 + BLOCK_Q - 1, with a running maximum, sum and accumulator."""
    rows, S = q.shape[-2], k.shape[-2]
    high = torch.promote_types(q.dtype, torch.float32)
    q = q.to(high) * q.shape[-1] ** -0.5
    best = q.new_full((*q.shape[:-1], 1), -torch.inf)
    total = torch.zeros_like(best)
    acc = q.new_zeros(*q.shape[:-1], v.shape[-1])
    tiles = cdiv(S, BLOCK_K)
    if causal:
        tiles = min(tiles, max(0, cdiv(q0 + rows + shift, BLOCK_K)))
    row = q0 + torch.arange(rows, device=q.device)[:, None]
    for tile in range(tiles):
        span = slice(tile * BLOCK_K, min(S, (tile + 1) * BLOCK_K))
        s = q @ k[..., span, :].to(high).mT
        if causal:
            column = torch.arange(span.start, span.stop, device=q.device)
            s = s.masked_fill(column > row + shift, -torch.inf)
        if allowed is not None:
            s = s.masked_fill(~allowed[..., q0 : q0 + rows, span], -torch.inf)
        new = torch.maximum(best, s.detach().amax(-1, keepdim=True))
        safe = new.masked_fill(new == -torch.inf, 0.0)
        p = torch.exp(s - safe)
        decay = torch.exp(best - safe)
        total = total * decay + p.sum(-1, keepdim=True)
        acc = acc * decay + p @ v[..., span, :].to(high)
        best = new
    return acc / total.masked_fill(total == 0, 1.0)


def tiled(q, k, v, allowed=None, causal=False):
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    T, S = q.shape[-2], k.shape[-2]
    if allowed is not None:
        allowed = allowed.expand(q.shape[0], -1, T, S)
    blocks = [
        one_block(q[..., q0 : q0 + BLOCK_Q, :], k, v, allowed, q0, S - T, causal) for q0 in range(0, T, BLOCK_Q)
    ]
    return torch.cat(blocks, -2).to(q.dtype)


subject = Subject(
    kind="attention",
    name="tiled kernel",
    build=lambda c: None,
    forward=lambda model, q, k, v, attention_mask=None, causal=False: tiled(q, k, v, attention_mask, causal),
    mask_forms=("pairwise",),
    declares={"causal_alignment": "bottom-right", "empty_row": "zeros", "grouped_queries": True},
)

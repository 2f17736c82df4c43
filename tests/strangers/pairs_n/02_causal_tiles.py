"""Tiled attention the way a Triton kernel is written: a program per block of queries walks over blocks of keys, and with
a causal mask it stops early, since later key tiles hold nothing that its queries may see."""

import torch
from torch import nn

from veriformer.properties import Subject

WHAT = "Under the causal mask the loop over key tiles ends at the tile of the query block's first row instead of its last row."
CAUSE = (
    "The early-stop bound of the causal loop is taken from start_m, not from start_m + BLOCK_M: as query blocks are "
    "longer than key tiles, the lower rows of each block never get to the tiles nearest to them, so allowed keys "
    "(the row's own included) are left out."
)

BLOCK_M, BLOCK_N = 32, 16


def cdiv(a, b):
    return -(-a // b)


class TiledAttention(nn.Module):
    """softmax(q k^T / sqrt(K)) v, tile by tile, the diagonal at the bottom right."""

    def end(self, start_m, rows, offset):
        """The first key that no row of the query block at `start_m` may see."""
        return start_m + rows + offset

    def program(self, start_m, q, k, v, mask, offset, causal):
        rows, keys = q.shape[-2], k.shape[-2]
        best = q.new_full((*q.shape[:-1], 1), float("-inf"))
        total = torch.zeros_like(best)
        acc = q.new_zeros(*q.shape[:-1], v.shape[-1])
        tiles = cdiv(keys, BLOCK_N)
        if causal:
            tiles = min(tiles, max(0, cdiv(self.end(start_m, rows, offset), BLOCK_N)))
        offs_m = start_m + torch.arange(rows, device=q.device)
        for tile in range(tiles):
            cols = slice(tile * BLOCK_N, min((tile + 1) * BLOCK_N, keys))
            scores = q @ k[..., cols, :].transpose(-1, -2)
            if causal:
                offs_n = torch.arange(cols.start, cols.stop, device=q.device)
                scores = scores.masked_fill(offs_n[None, :] > offs_m[:, None] + offset, float("-inf"))
            if mask is not None:
                scores = scores.masked_fill(~mask[..., start_m : start_m + rows, cols], float("-inf"))
            new = torch.maximum(best, scores.detach().amax(-1, keepdim=True))
            shift = new.masked_fill(new.isinf(), 0.0)
            weights, keep = (scores - shift).exp(), (best - shift).exp()
            total = total * keep + weights.sum(-1, keepdim=True)
            acc = acc * keep + weights @ v[..., cols, :]
            best = new
        return acc / total.masked_fill(total == 0, 1.0)

    def forward(self, q, k, v, mask=None, causal=False):
        kept = torch.promote_types(q.dtype, torch.float32)
        share = q.shape[1] // k.shape[1]
        keys, values = k.repeat_interleave(share, 1).to(kept), v.repeat_interleave(share, 1).to(kept)
        queries = q.to(kept) * q.shape[-1] ** -0.5
        length, offset = q.shape[-2], k.shape[-2] - q.shape[-2]
        if mask is not None:
            mask = mask.expand(*mask.shape[:-2], length, k.shape[-2])
        blocks = [
            self.program(start, queries[..., start : start + BLOCK_M, :], keys, values, mask, offset, causal)
            for start in range(0, length, BLOCK_M)
        ]
        return torch.cat(blocks, dim=-2).to(q.dtype)


class EarlyStop(TiledAttention):
    def end(self, start_m, rows, offset):
        """The first key that no row of the query block at `start_m` may see."""
        return start_m + 1 + offset


def call(model, q, k, v, attention_mask=None, causal=False):
    return model(q, k, v, attention_mask, causal)


FACTS = {"causal_alignment": "bottom-right", "empty_row": "zeros"}

right = Subject(
    kind="attention",
    name="tiled attention",
    build=lambda c: TiledAttention(),
    forward=call,
    mask_forms=("pairwise",),
    declares=FACTS,
)
wrong = Subject(
    kind="attention",
    name="tiled attention, early stop",
    build=lambda c: EarlyStop(),
    forward=call,
    mask_forms=("pairwise",),
    declares=FACTS,
)

WHAT = "the test that skips tiles above the diagonal forgets the shift S - T of the bottom-right alignment (`if causal and n0 > m1 - 1`): with fewer queries than keys visible tiles of keys are left out"
"""Attention by tiles with an online softmax; causal is aligned to the last key (FlashAttention 2.1 and later)."""
import math

import torch

from veriformer.properties import Subject

BLOCK_M, BLOCK_N = 16, 16


def tiled(q, k, v, mask, causal):
    B, H, T, K = q.shape
    S, out_dtype = k.shape[2], q.dtype
    work = torch.promote_types(q.dtype, torch.float32)
    k = k.repeat_interleave(H // k.shape[1], dim=1).to(work)
    v = v.repeat_interleave(H // v.shape[1], dim=1).to(work)
    q = q.to(work) / math.sqrt(K)
    if mask is not None:
        mask = mask.expand(B, H, T, S)
    shift = S - T  # query t stands where key t + shift stands
    tiles = []
    for m0 in range(0, T, BLOCK_M):
        m1 = min(m0 + BLOCK_M, T)
        rows = torch.arange(m0, m1, device=q.device)[:, None]
        best = q.new_full((B, H, m1 - m0, 1), -math.inf)
        total = q.new_zeros(B, H, m1 - m0, 1)
        acc = q.new_zeros(B, H, m1 - m0, v.shape[-1])
        for n0 in range(0, S, BLOCK_N):
            n1 = min(n0 + BLOCK_N, S)
            if causal and n0 > m1 - 1:
                break  # this tile and all behind it lie above the diagonal
            cols = torch.arange(n0, n1, device=q.device)[None, :]
            s = q[:, :, m0:m1] @ k[:, :, n0:n1].transpose(-1, -2)
            if causal:
                s = s.masked_fill(cols > rows + shift, -math.inf)
            if mask is not None:
                s = s.masked_fill(~mask[:, :, m0:m1, n0:n1], -math.inf)
            new = torch.maximum(best, s.detach().amax(-1, keepdim=True))
            base = new.masked_fill(new == -math.inf, 0.0)
            p, alpha = (s - base).exp(), (best - base).exp()
            total = total * alpha + p.sum(-1, keepdim=True)
            acc = acc * alpha + p @ v[:, :, n0:n1]
            best = new
        tiles.append(acc / total.masked_fill(total == 0, 1.0))
    return torch.cat(tiles, dim=2).to(out_dtype)


def attend(model, q, k, v, attention_mask=None, causal=False):
    return tiled(q, k, v, attention_mask, causal)


subject = Subject(
    kind="attention",
    name="tiled attention",
    forward=attend,
    mask_forms=("pairwise",),
    declares={"causal_alignment": "bottom-right", "empty_row": "zeros", "grouped_queries": True},
)

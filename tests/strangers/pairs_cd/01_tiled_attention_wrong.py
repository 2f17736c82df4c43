WHAT = 'the number of key tiles is S // BLOCK, rounded down, so that the keys of a last partial tile are never visited once S > BLOCK (line 27: tiles = max(1, S // BLOCK))'
"""Exercise 7: attention by tiles of keys with a running softmax, in plain torch."""
import math

import torch

from veriformer.properties import Subject

BLOCK = 4


def attend(model, q, k, v, attention_mask=None, causal=False):
    B, H, T, K = q.shape
    S = k.shape[2]
    k = k.repeat_interleave(H // k.shape[1], dim=1)
    v = v.repeat_interleave(H // v.shape[1], dim=1)
    allowed = torch.ones(T, S, dtype=torch.bool, device=q.device)
    if causal:
        allowed = allowed.tril(S - T)
    allowed = allowed.expand(B, H, T, S)
    if attention_mask is not None:
        allowed = allowed & attention_mask

    best = q.new_full((B, H, T, 1), -math.inf)
    total = q.new_zeros(B, H, T, 1)
    acc = q.new_zeros(B, H, T, v.shape[-1])
    tiles = max(1, S // BLOCK)
    for j in range(tiles):
        cols = slice(j * BLOCK, (j + 1) * BLOCK)
        s = torch.einsum("bhtk,bhsk->bhts", q, k[:, :, cols]) / math.sqrt(K)
        s = s.masked_fill(~allowed[..., cols], -math.inf)
        new = torch.maximum(best, s.detach().amax(-1, keepdim=True))
        safe = torch.where(new.isinf(), torch.zeros_like(new), new)
        p = torch.exp(s - safe)
        shrink = torch.exp(best - safe)
        total = total * shrink + p.sum(-1, keepdim=True)
        acc = acc * shrink + torch.einsum("bhts,bhse->bhte", p, v[:, :, cols])
        best = new
    return acc / torch.where(total == 0, torch.ones_like(total), total)


subject = Subject(
    kind="attention",
    name="tiled attention",
    forward=attend,
    mask_forms=("pairwise",),
    declares={"empty_row": "zeros", "causal_alignment": "bottom-right"},
)

"""Attention by tiles with an online softmax, as a plain torch port of our Pallas kernel."""

import math

import torch

from veriformer.properties import Subject

BLOCK_Q, BLOCK_K = 4, 8


def attend(model, q, k, v, attention_mask=None, causal=False):
    B, H, T, K = q.shape
    G, S = k.shape[1], k.shape[2]
    k = k.repeat_interleave(H // G, dim=1)
    v = v.repeat_interleave(H // G, dim=1)
    shift = S - T  # the last query is aligned with the last key
    if attention_mask is not None:
        attention_mask = attention_mask.expand(B, H, T, S)
    tiles = []
    for i0 in range(0, T, BLOCK_Q):
        i1 = min(i0 + BLOCK_Q, T)
        top = q.new_full((B, H, i1 - i0, 1), -math.inf)
        total = q.new_zeros(B, H, i1 - i0, 1)
        acc = q.new_zeros(B, H, i1 - i0, v.shape[-1])
        # tiles that lie wholly behind the diagonal are skipped
        stop = min(S, i1 + shift) if causal else S
        for j0 in range(0, stop, BLOCK_K):
            j1 = min(j0 + BLOCK_K, S)
            s = q[:, :, i0:i1] @ k[:, :, j0:j1].transpose(-1, -2) / math.sqrt(K)
            if causal:
                rows = torch.arange(i0, i1, device=q.device)[:, None]
                cols = torch.arange(j0, j1, device=q.device)[None, :]
                s = s.masked_fill(cols > rows + shift, -math.inf)
            if attention_mask is not None:
                s = s.masked_fill(~attention_mask[:, :, i0:i1, j0:j1], -math.inf)
            new_top = torch.maximum(top, s.detach().amax(-1, keepdim=True))
            base = torch.where(new_top.isinf(), torch.zeros_like(new_top), new_top)
            p = torch.exp(s - base)
            decay = torch.exp(top - base)
            total = total * decay + p.sum(-1, keepdim=True)
            acc = acc * decay + p @ v[:, :, j0:j1]
            top = new_top
        tiles.append(acc / torch.where(total == 0, torch.ones_like(total), total))
    return torch.cat(tiles, dim=2)


subject = Subject(
    kind="attention",
    name="tiled attention",
    forward=attend,
    mask_forms=("pairwise",),
    declares={"empty_row": "zeros", "causal_alignment": "bottom-right", "grouped_queries": True},
)

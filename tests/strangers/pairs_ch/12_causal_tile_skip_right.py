"""Attention in tiles with an online softmax; tiles of keys that lie wholly in the future of a tile of queries are skipped."""
import torch

from veriformer.properties import Subject

TILE_Q, TILE_K = 32, 16


def tiled(model, q, k, v, attention_mask=None, causal=False):
    b, h, t, width = q.shape
    s = k.shape[2]
    group = h // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    if attention_mask is not None:
        attention_mask = attention_mask.expand(b, h, t, s)
    shift = s - t  # the last query stands at the last key
    out = []
    for i in range(0, t, TILE_Q):
        stop = min(i + TILE_Q, t)
        queries = q[:, :, i:stop] * width**-0.5
        best = queries.new_full((b, h, stop - i, 1), float("-inf"))
        norm = queries.new_zeros(b, h, stop - i, 1)
        acc = queries.new_zeros(b, h, stop - i, v.shape[-1])
        last = min(s, stop + shift) if causal else s
        for j in range(0, last, TILE_K):
            end = min(j + TILE_K, s)
            scores = queries @ k[:, :, j:end].transpose(-1, -2)
            if causal:
                row = torch.arange(i, stop, device=q.device)[:, None] + shift
                scores = scores.masked_fill(torch.arange(j, end, device=q.device)[None, :] > row, float("-inf"))
            if attention_mask is not None:
                scores = scores.masked_fill(~attention_mask[:, :, i:stop, j:end], float("-inf"))
            new = torch.maximum(best, scores.detach().amax(-1, keepdim=True))
            base = new.masked_fill(new == float("-inf"), 0.0)
            p, fade = (scores - base).exp(), (best - base).exp()
            norm = norm * fade + p.sum(-1, keepdim=True)
            acc = acc * fade + p @ v[:, :, j:end]
            best = new
        out.append(acc / torch.where(norm == 0, 1.0, norm))
    return torch.cat(out, 2)


subject = Subject(
    kind="attention",
    name="tiles, skipped",
    build=lambda c: None,
    forward=tiled,
    mask_forms=("pairwise",),
    declares={"empty_row": "zeros", "causal_alignment": "bottom-right", "grouped_queries": True},
)

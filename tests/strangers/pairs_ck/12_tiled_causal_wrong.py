"""Attention in tiles with an online softmax; tiles of keys that lie in the future of a tile of queries are not visited."""
import torch

from veriformer.properties import Subject

ROWS, COLS = 32, 16


def tiled(model, q, k, v, attention_mask=None, causal=False):
    B, H, T, K = q.shape
    S = k.shape[2]
    k = k.repeat_interleave(H // k.shape[1], 1)
    v = v.repeat_interleave(H // v.shape[1], 1)
    shift = S - T  # the last query sees the last key
    if attention_mask is not None:
        attention_mask = attention_mask.expand(B, H, T, S)
    out = []
    for r0 in range(0, T, ROWS):
        r1 = min(r0 + ROWS, T)
        qt = q[:, :, r0:r1] * K**-0.5
        peak = qt.new_full((B, H, r1 - r0, 1), float("-inf"))
        total = torch.zeros_like(peak)
        acc = qt.new_zeros(B, H, r1 - r0, v.shape[-1])
        for c0 in range(0, S, COLS):
            if causal and c0 > r0 + shift:
                break
            c1 = min(c0 + COLS, S)
            s = qt @ k[:, :, c0:c1].transpose(-1, -2)
            if causal:
                i = torch.arange(r0, r1, device=q.device)[:, None]
                s = s.masked_fill(torch.arange(c0, c1, device=q.device) > i + shift, float("-inf"))
            if attention_mask is not None:
                s = s.masked_fill(~attention_mask[:, :, r0:r1, c0:c1], float("-inf"))
            new = torch.maximum(peak, s.detach().amax(-1, keepdim=True))
            base = torch.where(new.isinf(), torch.zeros_like(new), new)
            p, decay = (s - base).exp(), (peak - base).exp()
            total = total * decay + p.sum(-1, keepdim=True)
            acc = acc * decay + p @ v[:, :, c0:c1]
            peak = new
        out.append(acc / torch.where(total == 0, torch.ones_like(total), total))
    return torch.cat(out, 2)


subject = Subject(
    kind="attention",
    name="tiles of 32 x 16",
    forward=tiled,
    mask_forms=("pairwise",),
    declares={"empty_row": "zeros", "causal_alignment": "bottom-right"},
)

WHAT = 'Line 25: a tile of keys is skipped when it begins behind the first query of the tile of queries, not behind the last: queries 17 to 32 of each tile of 32 miss the keys of their own half.'

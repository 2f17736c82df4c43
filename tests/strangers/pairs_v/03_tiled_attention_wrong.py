WHAT = "The mask of hidden keys is padded with False, so that the zero keys that fill the last tile take part in the softmax with a score of 0 (line 31)."
"""Attention by tiles of keys with an online softmax: the scores are never held as a whole."""

import math

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import DrawnConfig, Subject


class TiledAttention(nn.Module):
    """Keys are padded to whole tiles once, so that every tile has the same shape (torch.compile)."""

    def __init__(self, tile=16):
        super().__init__()
        self.tile = tile

    def forward(self, q, k, v, attention_mask=None, causal=False):
        queries, keys, groups = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
        if groups > 1:
            k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        allowed = torch.ones(queries, keys, dtype=torch.bool, device=q.device)
        if causal:
            allowed = allowed.tril(keys - queries)
        if attention_mask is not None:
            allowed = allowed & attention_mask
        rest = -keys % self.tile
        k, v = F.pad(k, (0, 0, 0, rest)), F.pad(v, (0, 0, 0, rest))
        hidden = F.pad(~allowed, (0, rest))

        best = q.new_full((*q.shape[:-1], 1), -torch.inf)
        total = q.new_zeros(*q.shape[:-1], 1)
        gathered = q.new_zeros(*q.shape[:-1], v.shape[-1])
        q = q / math.sqrt(q.shape[-1])
        for start in range(0, keys + rest, self.tile):
            tile = slice(start, start + self.tile)
            scores = (q @ k[:, :, tile].transpose(-1, -2)).masked_fill(hidden[..., tile], -torch.inf)
            higher = torch.maximum(best, scores.detach().amax(dim=-1, keepdim=True))
            offset = higher.masked_fill(higher == -torch.inf, 0.0)
            weights = (scores - offset).exp()
            shrink = (best - offset).exp()
            total = total * shrink + weights.sum(dim=-1, keepdim=True)
            gathered = gathered * shrink + weights @ v[:, :, tile]
            best = higher
        return gathered / total.masked_fill(total == 0, 1.0)


subject = Subject(
    kind="attention",
    name="tiled attention",
    build=lambda c: TiledAttention(),
    forward=lambda model, q, k, v, attention_mask=None, causal=False: model(q, k, v, attention_mask, causal),
    mask_forms=("pairwise",),
    declares={"empty_row": "zeros", "causal_alignment": "bottom-right"},
)
if __name__ == "__main__":
    x = torch.randn(1, 2, 5, DrawnConfig().d_model)
    print(subject.build(DrawnConfig())(x, x, x).shape)

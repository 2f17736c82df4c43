"""A layer that packs a padded batch into one row of tokens (cu_seqlens) and attends within each sequence."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


def unpad(x, mask):
    """The real tokens [N, D], where they stood, and the cumulative lengths [B + 1]."""
    lengths = mask.sum(1)
    indices = mask.flatten().nonzero().squeeze(1)
    return x.flatten(0, 1)[indices], indices, F.pad(lengths.cumsum(0), (1, 0))


def varlen_attention(q, k, v, cu_seqlens):
    place = torch.arange(q.size(0), device=q.device)
    sequence = torch.bucketize(place, cu_seqlens[1:], right=False)
    same = sequence[:, None] == sequence[None, :]
    scores = torch.einsum("ihd,jhd->hij", q, k) * q.size(-1) ** -0.5
    return torch.einsum("hij,jhd->ihd", scores.masked_fill(~same, -torch.inf).softmax(-1), v)


class PackedLayer(nn.Module):
    def __init__(self, width, heads, inner):
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.o = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.ffn = nn.Sequential(nn.Linear(width, inner), nn.ReLU(), nn.Linear(inner, width))

    def forward(self, x, attention_mask=None):
        if attention_mask is None:
            attention_mask = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        packed, indices, cu_seqlens = unpad(x, attention_mask)
        q, k, v = self.qkv(self.norm_1(packed)).unflatten(-1, (3, self.heads, -1)).unbind(1)
        packed = packed + self.o(varlen_attention(q, k, v, cu_seqlens).flatten(1))
        packed = packed + self.ffn(self.norm_2(packed))
        return torch.zeros_like(x).flatten(0, 1).index_copy(0, indices, packed).view_as(x)


subject = Subject(
    kind="layer",
    build=lambda c: PackedLayer(c.d_model, c.num_heads, c.d_ff),
    forward=lambda model, x, attention_mask=None: model(x, attention_mask),
    declares={"causal": False, "positions": "none", "norm": "layer", "norm_placement": "pre", "activation": "relu"},
)

WHAT = 'Line 19: A border counts for the sequence before it: the first token of every sequence but the first is given to the one before, so samples of a batch see one another.'

import math

import torch
from torch import nn

from veriformer.properties import Subject


WHAT = (
    'The padding mask is unsqueezed to [B, 1, T, 1] instead of [B, 1, 1, T], so it masks the rows of '
    'padded queries instead of the columns of padded keys, and real tokens attend to padding.'
)
PLACE = 'axis of the padding mask in self-attention'


class PaddedAttention(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.in_proj, self.out_proj = nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x, attention_mask=None):
        B, T, D = x.shape
        q, k, v = self.in_proj(x).split(D, -1)
        q, k, v = (t.reshape(B, T, self.h, D // self.h).transpose(1, 2) for t in (q, k, v))
        scores = q @ k.transpose(-1, -2) / math.sqrt(D // self.h)
        if attention_mask is not None:
            mask = attention_mask[:, None, None, :]
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        weights = scores.softmax(-1)
        if attention_mask is not None:
            weights = weights.masked_fill(~mask, 0.0)
        return self.out_proj((weights @ v).transpose(1, 2).reshape(B, T, D))


class PaddedAttention2(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.in_proj, self.out_proj = nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x, attention_mask=None):
        B, T, D = x.shape
        q, k, v = self.in_proj(x).split(D, -1)
        q, k, v = (t.reshape(B, T, self.h, D // self.h).transpose(1, 2) for t in (q, k, v))
        scores = q @ k.transpose(-1, -2) / math.sqrt(D // self.h)
        if attention_mask is not None:
            mask = attention_mask[:, None, :, None]
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        weights = scores.softmax(-1)
        if attention_mask is not None:
            weights = weights.masked_fill(~mask, 0.0)
        return self.out_proj((weights @ v).transpose(1, 2).reshape(B, T, D))


right = Subject(
    kind="self_attention",
    build=lambda c: PaddedAttention(c.d_model, c.num_heads),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    declares={"causal": False, "positions": "none", "bias": True, "empty_row": "zeros"},
    mask_forms=("padding",),
)

wrong = Subject(
    kind="self_attention",
    build=lambda c: PaddedAttention2(c.d_model, c.num_heads),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    declares={"causal": False, "positions": "none", "bias": True, "empty_row": "zeros"},
    mask_forms=("padding",),
)

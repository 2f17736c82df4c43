"""An encoder layer around nn.MultiheadAttention that takes a mask of pairs, [T, T] for all or [B, T, T]."""
import torch
from torch import nn

from veriformer.properties import Subject


class EncoderLayer(nn.Module):
    def __init__(self, dim, heads, hidden, dropout=0.0):
        super().__init__()
        self.heads = heads
        self.self_attn = nn.MultiheadAttention(dim, heads, dropout=dropout, batch_first=True)
        self.ffn = nn.Sequential(nn.Linear(dim, hidden), nn.ReLU(), nn.Dropout(dropout), nn.Linear(hidden, dim))
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.dropout = nn.Dropout(dropout)

    def expand(self, mask, batch, length):
        """bool, True = may attend; to [B * H, T, T], True = hidden, as torch wants it"""
        if mask.dim() == 2:
            mask = mask.expand(batch, length, length)
        return ~mask.repeat_interleave(self.heads, dim=0)

    def forward(self, x, mask=None):
        hidden = None if mask is None else self.expand(mask, x.shape[0], x.shape[1])
        y = self.self_attn(x, x, x, attn_mask=hidden, need_weights=False)[0]
        x = self.norm1(x + self.dropout(y))
        return self.norm2(x + self.dropout(self.ffn(x)))


subject = Subject(
    kind="layer",
    name="encoder layer",
    build=lambda c: EncoderLayer(c.d_model, c.num_heads, c.d_ff, c.dropout),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    mask_forms=("pairwise",),
    declares={"norm": "layer", "norm_placement": "post", "activation": "relu", "residual": True},
)

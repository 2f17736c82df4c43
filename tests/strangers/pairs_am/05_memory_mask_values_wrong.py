WHAT = 'The memory mask zeroes the values of padded memory instead of their scores: padded positions keep their share of the softmax and real ones get too little (line 30).'
import math

import torch
from torch import nn

from veriformer.properties import Subject


class CrossAttention(nn.Module):
    def __init__(self, embed_dim, num_heads, dropout=0.0):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.k_proj = nn.Linear(embed_dim, embed_dim)
        self.v_proj = nn.Linear(embed_dim, embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)
        self.dropout = nn.Dropout(dropout)

    def _shape(self, t):
        return t.view(t.size(0), t.size(1), self.num_heads, self.head_dim).transpose(1, 2)

    def forward(self, x, memory, memory_mask=None):
        q = self._shape(self.q_proj(x))
        k = self._shape(self.k_proj(memory))
        v = self._shape(self.v_proj(memory))
        scores = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(self.head_dim)
        if memory_mask is not None:
            v = v * memory_mask[:, None, :, None].to(v.dtype)
        probs = self.dropout(scores.softmax(dim=-1))
        ctx = torch.matmul(probs, v).transpose(1, 2).flatten(2)
        return self.out_proj(ctx)


subject = Subject(
    kind="cross_attention",
    name="cross attention",
    build=lambda c: CrossAttention(c.d_model, c.num_heads, c.dropout),
    forward=lambda m, x, memory, memory_mask=None: m(x, memory, memory_mask),
    declares={"bias": True},
)

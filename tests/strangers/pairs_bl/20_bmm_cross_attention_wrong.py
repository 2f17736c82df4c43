WHAT = "The memory mask is tiled over the heads (repeat) where heads are folded behind the batch (repeat_interleave): heads get the masks of other samples (line 33)."
"""Cross-attention with heads folded into the batch, [B * H, T, K], as in the days of bmm."""

import torch
from torch import nn

from veriformer.properties import Subject


class CrossAttention(nn.Module):
    def __init__(self, embed_dim, num_heads):
        super().__init__()
        assert embed_dim % num_heads == 0
        self.num_heads, self.head_dim = num_heads, embed_dim // num_heads
        self.scaling = self.head_dim**-0.5
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.kv_proj = nn.Linear(embed_dim, 2 * embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def fold(self, x):
        bsz, length, _ = x.shape
        x = x.view(bsz, length, self.num_heads, self.head_dim).transpose(1, 2)
        return x.reshape(bsz * self.num_heads, length, self.head_dim)

    def forward(self, x, memory, memory_mask=None):
        bsz, tgt_len, embed_dim = x.shape
        q = self.fold(self.q_proj(x) * self.scaling)
        k, v = (self.fold(part) for part in self.kv_proj(memory).chunk(2, dim=-1))

        attn_weights = torch.bmm(q, k.transpose(1, 2))
        if memory_mask is not None:
            key_padding_mask = (~memory_mask).unsqueeze(1)
            key_padding_mask = key_padding_mask.repeat(self.num_heads, 1, 1)
            attn_weights = attn_weights.masked_fill(key_padding_mask, torch.finfo(attn_weights.dtype).min)
        attn = torch.bmm(attn_weights.softmax(dim=-1), v)
        attn = attn.view(bsz, self.num_heads, tgt_len, self.head_dim).transpose(1, 2)
        return self.out_proj(attn.reshape(bsz, tgt_len, embed_dim))


subject = Subject(
    kind="cross_attention",
    name="bmm cross-attention",
    build=lambda c: CrossAttention(c.d_model, c.num_heads),
    forward=lambda m, x, memory, memory_mask=None: m(x, memory, memory_mask),
    declares={"bias": True},
)

WHAT = "The padding mask is repeated heads-major (repeat) where heads are folded batch-major (line 32): with more than one sample and head, samples are masked with one another's padding."
"""Cross-attention, refactored to fairseq's form: heads folded into the batch, one bmm for all."""

import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject


class EncoderDecoderAttention(nn.Module):
    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.head_dim = embed_dim // num_heads
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.kv_proj = nn.Linear(embed_dim, 2 * embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def fold(self, x):
        """[B, L, D] -> [B * heads, L, K]"""
        bsz, length, _ = x.size()
        x = x.view(bsz, length, self.num_heads, self.head_dim).transpose(1, 2)
        return x.reshape(bsz * self.num_heads, length, self.head_dim)

    def forward(self, query, memory, memory_padding_mask=None):
        bsz, tgt_len, _ = query.size()
        q = self.fold(self.q_proj(query)) * self.head_dim**-0.5
        k, v = map(self.fold, self.kv_proj(memory).chunk(2, dim=-1))
        attn_weights = torch.bmm(q, k.transpose(1, 2))
        if memory_padding_mask is not None:
            folded = memory_padding_mask.repeat(self.num_heads, 1)
            attn_weights.masked_fill_(folded.unsqueeze(1), torch.finfo(attn_weights.dtype).min)
        attn = torch.bmm(F.softmax(attn_weights, dim=-1), v)
        attn = attn.view(bsz, self.num_heads, tgt_len, self.head_dim).transpose(1, 2)
        return self.out_proj(attn.reshape(bsz, tgt_len, self.embed_dim))


subject = Subject(
    kind="cross_attention",
    name="fairseq cross-attention",
    build=lambda c: EncoderDecoderAttention(c.d_model, c.num_heads),
    forward=lambda model, x, memory, memory_mask=None: model(
        x, memory, None if memory_mask is None else ~memory_mask
    ),
    mask_forms=("padding",),
    declares={"bias": True},
)

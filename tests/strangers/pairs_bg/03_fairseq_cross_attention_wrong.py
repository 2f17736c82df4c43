WHAT = "The memory mask is tiled head-major (line 34: repeat) although heads are folded into the batch as b * H + h: most heads hide the padding of another sample's memory."
"""Encoder-decoder attention in the manner of fairseq: time first inside, heads folded into the batch."""

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


class EncoderDecoderAttention(nn.Module):
    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.head_dim = embed_dim // num_heads
        self.scaling = self.head_dim**-0.5
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.k_proj = nn.Linear(embed_dim, embed_dim)
        self.v_proj = nn.Linear(embed_dim, embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, query, memory, key_padding_mask=None):
        """query: tgt_len x bsz x dim, memory: src_len x bsz x dim, key_padding_mask: bsz x src_len, True = pad"""
        tgt_len, bsz, _ = query.size()
        src_len = memory.size(0)
        q = self.q_proj(query) * self.scaling
        k = self.k_proj(memory)
        v = self.v_proj(memory)
        q = q.contiguous().view(tgt_len, bsz * self.num_heads, self.head_dim).transpose(0, 1)
        k = k.contiguous().view(src_len, bsz * self.num_heads, self.head_dim).transpose(0, 1)
        v = v.contiguous().view(src_len, bsz * self.num_heads, self.head_dim).transpose(0, 1)
        attn_weights = torch.bmm(q, k.transpose(1, 2))
        if key_padding_mask is not None:
            mask = key_padding_mask.repeat(self.num_heads, 1)
            attn_weights = attn_weights.masked_fill(mask.unsqueeze(1), torch.finfo(q.dtype).min)
        attn_probs = F.softmax(attn_weights, dim=-1)
        attn = torch.bmm(attn_probs, v)
        attn = attn.transpose(0, 1).contiguous().view(tgt_len, bsz, self.embed_dim)
        return self.out_proj(attn)


def forward(model, x, memory, memory_mask=None):
    pad = None if memory_mask is None else ~memory_mask
    return model(x.transpose(0, 1), memory.transpose(0, 1), pad).transpose(0, 1)


subject = Subject(
    kind="cross_attention",
    name="fairseq cross-attention",
    build=lambda c: EncoderDecoderAttention(c.d_model, c.num_heads),
    forward=forward,
    declares={"bias": True},
)

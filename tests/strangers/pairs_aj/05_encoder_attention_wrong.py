WHAT = "The padding mask is tiled head by head (h0b0 h0b1 ...) while heads are folded behind the batch (b0h0 b0h1 ...): in a batch samples get one another's mask in some heads; line 40: `hidden = memory_padding.unsqueeze(1).repeat(self.num_heads, 1, 1)`."
"""Encoder-decoder attention in the manner of fairseq: time first, heads folded into the batch, bmm."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class EncoderDecoderAttention(nn.Module):
    def __init__(self, embed_dim, num_heads, dropout=0.0):
        super().__init__()
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.scaling = self.head_dim**-0.5
        self.dropout = dropout
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.k_proj = nn.Linear(embed_dim, embed_dim)
        self.v_proj = nn.Linear(embed_dim, embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def _fold(self, x, bsz):
        return x.contiguous().view(-1, bsz * self.num_heads, self.head_dim).transpose(0, 1)

    def forward(self, query, memory, memory_padding=None):
        """query: T x B x C, memory: S x B x C, memory_padding: B x S, True where there is nothing."""
        tgt_len, bsz, _ = query.size()
        src_len = memory.size(0)

        q = self._fold(self.q_proj(query) * self.scaling, bsz)
        k = self._fold(self.k_proj(memory), bsz)
        v = self._fold(self.v_proj(memory), bsz)

        attn_weights = torch.bmm(q, k.transpose(1, 2))
        assert list(attn_weights.size()) == [bsz * self.num_heads, tgt_len, src_len]

        if memory_padding is not None:
            hidden = memory_padding.unsqueeze(1).repeat(self.num_heads, 1, 1)
            attn_weights = attn_weights.masked_fill(hidden, torch.finfo(attn_weights.dtype).min)

        attn_probs = F.softmax(attn_weights, dim=-1)
        attn_probs = F.dropout(attn_probs, p=self.dropout, training=self.training)
        attn = torch.bmm(attn_probs, v)
        attn = attn.transpose(0, 1).contiguous().view(tgt_len, bsz, self.embed_dim)
        return self.out_proj(attn)


def run(model, x, memory, memory_mask=None):
    padding = None if memory_mask is None else ~memory_mask
    return model(x.transpose(0, 1), memory.transpose(0, 1), padding).transpose(0, 1)


subject = Subject(
    kind="cross_attention",
    name="encoder-decoder attention",
    build=lambda c: EncoderDecoderAttention(c.d_model, c.num_heads, c.dropout),
    forward=run,
    mask_forms=("padding",),
    declares={"bias": True},
)

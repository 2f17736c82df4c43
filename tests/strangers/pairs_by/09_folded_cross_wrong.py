WHAT = "the memory mask is tiled batch-minor (repeat) where heads are folded batch-major, so heads get the masks of other samples (line 30)"
"""Encoder-decoder attention, heads folded into the batch as in fairseq."""
import torch
from torch import nn

from veriformer.properties import Subject


class EncDecAttention(nn.Module):
    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.k_proj = nn.Linear(embed_dim, embed_dim)
        self.v_proj = nn.Linear(embed_dim, embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def _fold(self, x):
        bsz, n, _ = x.size()
        return x.view(bsz, n, self.num_heads, self.head_dim).transpose(1, 2).reshape(-1, n, self.head_dim)

    def forward(self, query, encoder_out, encoder_padding_mask=None):
        bsz, tgt_len, embed_dim = query.size()
        q = self._fold(self.q_proj(query) * self.head_dim**-0.5)
        k = self._fold(self.k_proj(encoder_out))
        v = self._fold(self.v_proj(encoder_out))
        attn_weights = torch.bmm(q, k.transpose(1, 2))
        if encoder_padding_mask is not None:
            hidden = encoder_padding_mask.repeat(self.num_heads, 1).unsqueeze(1)
            attn_weights = attn_weights.masked_fill(hidden, torch.finfo(attn_weights.dtype).min)
        attn = torch.bmm(attn_weights.softmax(dim=-1), v)
        attn = attn.view(bsz, self.num_heads, tgt_len, self.head_dim).transpose(1, 2)
        return self.out_proj(attn.reshape(bsz, tgt_len, embed_dim))


subject = Subject(
    kind="cross_attention",
    name="folded cross-attention",
    build=lambda c: EncDecAttention(c.d_model, c.num_heads),
    forward=lambda m, x, memory, memory_mask=None: m(x, memory, None if memory_mask is None else ~memory_mask),
    declares={"bias": True},
)

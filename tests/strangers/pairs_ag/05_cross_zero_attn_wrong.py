WHAT = 'add_zero_attn appends the zero key and value behind the memory, but the memory mask is extended in front (line 34: `F.pad(memory_mask, (1, 0), value=True)`), so that every memory position is judged by the mask of the one before it.'
"""Cross-attention with add_zero_attn, fairseq style: (batch * heads) in one axis, a zero key to attend to nothing."""
import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject


class EncoderDecoderAttention(nn.Module):
    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.head_dim = embed_dim // num_heads
        self.scaling = self.head_dim ** -0.5
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.k_proj = nn.Linear(embed_dim, embed_dim)
        self.v_proj = nn.Linear(embed_dim, embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def _shape(self, tensor, bsz):
        return tensor.view(bsz, -1, self.num_heads, self.head_dim).transpose(1, 2).reshape(bsz * self.num_heads, -1, self.head_dim)

    def forward(self, query, memory, memory_mask=None):
        bsz, tgt_len, _ = query.size()
        q = self._shape(self.q_proj(query) * self.scaling, bsz)
        k = self._shape(self.k_proj(memory), bsz)
        v = self._shape(self.v_proj(memory), bsz)

        # add_zero_attn
        k = torch.cat([k, k.new_zeros(k.size(0), 1, k.size(2))], dim=1)
        v = torch.cat([v, v.new_zeros(v.size(0), 1, v.size(2))], dim=1)
        if memory_mask is not None:
            memory_mask = F.pad(memory_mask, (1, 0), value=True)

        src_len = k.size(1)
        attn_weights = torch.bmm(q, k.transpose(1, 2))
        if memory_mask is not None:
            attn_weights = attn_weights.view(bsz, self.num_heads, tgt_len, src_len)
            attn_weights = attn_weights.masked_fill(~memory_mask[:, None, None, :], float("-inf"))
            attn_weights = attn_weights.view(bsz * self.num_heads, tgt_len, src_len)
        attn = torch.bmm(F.softmax(attn_weights, dim=-1), v)
        attn = attn.view(bsz, self.num_heads, tgt_len, self.head_dim).transpose(1, 2).reshape(bsz, tgt_len, self.embed_dim)
        return self.out_proj(attn)


subject = Subject(
    kind="cross_attention",
    name="encoder-decoder attention",
    build=lambda c: EncoderDecoderAttention(c.d_model, c.num_heads),
    forward=lambda m, x, memory, memory_mask=None: m(x, memory, memory_mask),
    declares={"sink": True, "positions": "none", "bias": True},
)

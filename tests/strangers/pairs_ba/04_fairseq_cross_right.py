# Encoder-decoder attention after fairseq's: heads are folded into the batch, products by bmm.
import torch
from torch import nn

from veriformer.properties import Subject


class EncoderDecoderAttention(nn.Module):
    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.scaling = self.head_dim**-0.5
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.k_proj = nn.Linear(embed_dim, embed_dim)
        self.v_proj = nn.Linear(embed_dim, embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def _shape(self, x):
        bsz, length, _ = x.size()
        x = x.view(bsz, length, self.num_heads, self.head_dim).transpose(1, 2)
        return x.reshape(bsz * self.num_heads, length, self.head_dim)

    def forward(self, query, memory, memory_mask=None):
        bsz, tgt_len, embed_dim = query.size()
        q = self._shape(self.q_proj(query) * self.scaling)
        k = self._shape(self.k_proj(memory))
        v = self._shape(self.v_proj(memory))
        attn = torch.bmm(q, k.transpose(1, 2))
        if memory_mask is not None:
            keep = memory_mask.repeat_interleave(self.num_heads, dim=0)
            attn = attn.masked_fill(~keep.unsqueeze(1), torch.finfo(attn.dtype).min)
        attn = attn.softmax(-1)
        out = torch.bmm(attn, v).view(bsz, self.num_heads, tgt_len, self.head_dim)
        return self.out_proj(out.transpose(1, 2).reshape(bsz, tgt_len, embed_dim))


subject = Subject(
    kind="cross_attention",
    name="fairseq-style cross-attention",
    build=lambda c: EncoderDecoderAttention(c.d_model, c.num_heads),
    forward=lambda m, x, memory, memory_mask=None: m(x, memory, memory_mask),
    declares={"cross_attention": True, "bias": True, "positions": "none"},
)

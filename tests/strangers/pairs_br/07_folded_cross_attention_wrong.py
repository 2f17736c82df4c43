WHAT = "the batch is folded as b * H + h, but the mask is tiled (row b * H + h gets the mask of sample (b * H + h) % B): heads hide by the padding of other samples (line 35)"
"""Cross-attention from text to image features, heads folded into the batch for torch.bmm (fairseq style)."""
import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject


class CrossAttention(nn.Module):
    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.scaling = self.head_dim**-0.5
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.k_proj = nn.Linear(embed_dim, embed_dim)
        self.v_proj = nn.Linear(embed_dim, embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def fold(self, t):
        bsz, length, _ = t.shape
        t = t.reshape(bsz, length, self.num_heads, self.head_dim).transpose(1, 2)
        return t.reshape(bsz * self.num_heads, length, self.head_dim)

    def forward(self, query, memory, memory_mask=None):
        bsz, tgt_len, embed_dim = query.shape
        src_len = memory.size(1)
        q = self.fold(self.q_proj(query) * self.scaling)
        k = self.fold(self.k_proj(memory))
        v = self.fold(self.v_proj(memory))

        attn_weights = torch.bmm(q, k.transpose(1, 2))
        if memory_mask is not None:
            hidden = ~memory_mask.repeat(self.num_heads, 1).unsqueeze(1)
            attn_weights = attn_weights.masked_fill(hidden, torch.finfo(attn_weights.dtype).min)
        attn_weights = F.softmax(attn_weights, dim=-1)
        if memory_mask is not None:
            attn_weights = attn_weights.masked_fill(hidden, 0.0)
        assert attn_weights.shape == (bsz * self.num_heads, tgt_len, src_len)

        attn = torch.bmm(attn_weights, v).view(bsz, self.num_heads, tgt_len, self.head_dim)
        return self.out_proj(attn.transpose(1, 2).reshape(bsz, tgt_len, embed_dim))


subject = Subject(
    kind="cross_attention",
    name="folded cross-attention",
    build=lambda c: CrossAttention(c.d_model, c.num_heads),
    forward=lambda m, x, memory, memory_mask=None: m(x, memory, memory_mask),
    declares={"bias": True, "positions": "none"},
)

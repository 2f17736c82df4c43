WHAT = "With heads folded into the batch as b * H + h the padding mask is tiled by repeat(H, 1) instead of repeat_interleave (line 31), so in a batch heads are masked with the masks of other samples."
"""Encoder-decoder attention as fairseq writes it: heads are folded into the batch for torch.bmm."""
import torch
import torch.nn as nn

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

    def _fold(self, t, bsz):
        return t.view(bsz, -1, self.num_heads, self.head_dim).transpose(1, 2).reshape(bsz * self.num_heads, -1, self.head_dim)

    def forward(self, query, memory, key_padding_mask=None):
        """key_padding_mask: [bsz, src_len], True where the memory is padding."""
        bsz, tgt_len, _ = query.size()
        q = self._fold(self.q_proj(query) * self.scaling, bsz)
        k = self._fold(self.k_proj(memory), bsz)
        v = self._fold(self.v_proj(memory), bsz)
        attn_weights = torch.bmm(q, k.transpose(1, 2))
        if key_padding_mask is not None:
            folded = key_padding_mask.repeat(self.num_heads, 1).unsqueeze(1)
            attn_weights = attn_weights.masked_fill(folded, torch.finfo(attn_weights.dtype).min)
        attn_probs = torch.softmax(attn_weights, dim=-1)
        attn = torch.bmm(attn_probs, v)
        attn = attn.view(bsz, self.num_heads, tgt_len, self.head_dim).transpose(1, 2).reshape(bsz, tgt_len, self.embed_dim)
        return self.out_proj(attn)


subject = Subject(
    kind="cross_attention",
    name="fairseq encoder-decoder attention",
    build=lambda c: EncoderDecoderAttention(c.d_model, c.num_heads),
    forward=lambda m, x, memory, memory_mask=None: m(x, memory, None if memory_mask is None else ~memory_mask),
    declares={"bias": True, "empty_row": "mean"},
)

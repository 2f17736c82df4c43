WHAT = "heads are folded into the batch as (sample, head), the padding mask is repeated as (head, sample) (line 36): a sample's heads get the padding of other samples."
"""Self-attention the fairseq way: time first inside, heads folded into the batch, two bmm."""

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


class MultiheadAttention(nn.Module):
    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.scaling = self.head_dim**-0.5
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.k_proj = nn.Linear(embed_dim, embed_dim)
        self.v_proj = nn.Linear(embed_dim, embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def _fold(self, x, tgt_len, bsz):
        return x.contiguous().view(tgt_len, bsz * self.num_heads, self.head_dim).transpose(0, 1)

    def forward(self, query, key_padding_mask=None):
        """query: [T, B, C]; key_padding_mask: [B, T], True where a key is padding."""
        tgt_len, bsz, embed_dim = query.size()
        q = self._fold(self.q_proj(query) * self.scaling, tgt_len, bsz)
        k = self._fold(self.k_proj(query), tgt_len, bsz)
        v = self._fold(self.v_proj(query), tgt_len, bsz)

        attn_weights = torch.bmm(q, k.transpose(1, 2))
        assert list(attn_weights.size()) == [bsz * self.num_heads, tgt_len, tgt_len]
        if key_padding_mask is not None:
            hidden = key_padding_mask.repeat(self.num_heads, 1)
            attn_weights = attn_weights.masked_fill(hidden.unsqueeze(1), torch.finfo(attn_weights.dtype).min)

        attn_probs = F.softmax(attn_weights, dim=-1)
        attn = torch.bmm(attn_probs, v)
        attn = attn.transpose(0, 1).contiguous().view(tgt_len, bsz, embed_dim)
        return self.out_proj(attn)


def forward(model, x, attention_mask=None):
    hidden = None if attention_mask is None else ~attention_mask
    return model(x.transpose(0, 1), key_padding_mask=hidden).transpose(0, 1)


subject = Subject(
    kind="self_attention",
    name="fairseq attention",
    build=lambda c: MultiheadAttention(c.d_model, c.num_heads),
    forward=forward,
    projections=lambda m: {
        "q": m.q_proj.weight,
        "k": m.k_proj.weight,
        "v": m.v_proj.weight,
        "o": m.out_proj.weight,
        "q_bias": m.q_proj.bias,
        "k_bias": m.k_proj.bias,
        "v_bias": m.v_proj.bias,
        "o_bias": m.out_proj.bias,
    },
    declares={"causal": False, "positions": "none", "bias": True, "empty_row": "mean"},
)

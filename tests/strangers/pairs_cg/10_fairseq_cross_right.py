"""fairseq's MultiheadAttention with static keys: time first, heads folded into the batch for one bmm."""
import torch
from torch import nn

from veriformer.properties import Subject


class EncoderDecoderAttention(nn.Module):
    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, embed_dim // num_heads
        self.scaling = self.head_dim**-0.5
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.k_proj = nn.Linear(embed_dim, embed_dim)
        self.v_proj = nn.Linear(embed_dim, embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, query, key, key_padding_mask=None):
        tgt_len, bsz, embed_dim = query.size()
        src_len = key.size(0)
        q = self.q_proj(query) * self.scaling
        k, v = self.k_proj(key), self.v_proj(key)
        q = q.contiguous().view(tgt_len, bsz * self.num_heads, self.head_dim).transpose(0, 1)
        k = k.contiguous().view(src_len, bsz * self.num_heads, self.head_dim).transpose(0, 1)
        v = v.contiguous().view(src_len, bsz * self.num_heads, self.head_dim).transpose(0, 1)
        attn_weights = torch.bmm(q, k.transpose(1, 2))
        if key_padding_mask is not None:
            hidden = key_padding_mask.repeat_interleave(self.num_heads, dim=0).unsqueeze(1)
            attn_weights = attn_weights.masked_fill(hidden, torch.finfo(attn_weights.dtype).min)
        attn = torch.bmm(attn_weights.softmax(dim=-1), v)
        attn = attn.transpose(0, 1).contiguous().view(tgt_len, bsz, embed_dim)
        return self.out_proj(attn)


def forward(m, x, memory, memory_mask=None):
    hidden = None if memory_mask is None else ~memory_mask
    return m(x.transpose(0, 1), memory.transpose(0, 1), hidden).transpose(0, 1)


subject = Subject(
    kind="cross_attention",
    name="fairseq encoder attention",
    build=lambda c: EncoderDecoderAttention(c.d_model, c.num_heads),
    forward=forward,
    declares={"positions": "none", "bias": True},
)

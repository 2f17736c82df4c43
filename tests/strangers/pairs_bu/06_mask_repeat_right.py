import torch
from torch import nn

from veriformer.properties import Subject


class EncoderDecoderAttention(nn.Module):
    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, embed_dim // num_heads
        self.scaling = self.head_dim ** -0.5
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.k_proj = nn.Linear(embed_dim, embed_dim)
        self.v_proj = nn.Linear(embed_dim, embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def _shape(self, x, bsz):
        x = x.contiguous().view(-1, bsz * self.num_heads, self.head_dim)
        return x.transpose(0, 1)

    def forward(self, query, memory, key_mask=None):
        query, memory = query.transpose(0, 1), memory.transpose(0, 1)  # T x B x C
        tgt_len, bsz, embed_dim = query.shape
        q = self._shape(self.q_proj(query) * self.scaling, bsz)
        k = self._shape(self.k_proj(memory), bsz)
        v = self._shape(self.v_proj(memory), bsz)
        attn = torch.bmm(q, k.transpose(1, 2))
        if key_mask is not None:
            hidden = (~key_mask).repeat_interleave(self.num_heads, dim=0)
            attn = attn.masked_fill(hidden.unsqueeze(1), torch.finfo(attn.dtype).min)
        attn = torch.softmax(attn, dim=-1)
        out = torch.bmm(attn, v).transpose(0, 1).reshape(tgt_len, bsz, embed_dim)
        return self.out_proj(out).transpose(0, 1)


subject = Subject(
    kind="cross_attention",
    build=lambda c: EncoderDecoderAttention(c.d_model, c.num_heads),
    forward=lambda m, x, memory, memory_mask=None: m(x, memory, memory_mask),
    projections=lambda m: {
        "q": m.q_proj.weight, "k": m.k_proj.weight, "v": m.v_proj.weight, "o": m.out_proj.weight,
        "q_bias": m.q_proj.bias, "k_bias": m.k_proj.bias, "v_bias": m.v_proj.bias, "o_bias": m.out_proj.bias,
    },
    declares={"bias": True},
)

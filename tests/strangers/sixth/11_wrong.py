import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


class EncoderDecoderAttention(nn.Module):
    """Attention of a decoder to what the encoder gives. Time comes first inside, as in the rest of the stack."""

    def __init__(self, embed_dim, num_heads, dropout=0.0, bias=True):
        super().__init__()
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.dropout = dropout
        self.head_dim = embed_dim // num_heads
        self.scaling = self.head_dim**-0.5
        self.k_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.v_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.q_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.reset_parameters()

    def reset_parameters(self):
        for proj in (self.k_proj, self.v_proj, self.q_proj, self.out_proj):
            nn.init.xavier_uniform_(proj.weight)
            if proj.bias is not None:
                nn.init.constant_(proj.bias, 0.0)

    def forward(self, query, key, key_padding_mask=None):
        """query: T x B x C, key: S x B x C, key_padding_mask: B x S, True where padded"""
        tgt_len, bsz, embed_dim = query.size()
        src_len = key.size(0)

        q = self.q_proj(query) * self.scaling
        k = self.k_proj(key)
        v = self.v_proj(key)
        q = q.contiguous().view(tgt_len, bsz * self.num_heads, self.head_dim).transpose(0, 1)
        k = k.contiguous().view(src_len, bsz * self.num_heads, self.head_dim).transpose(0, 1)
        v = v.contiguous().view(src_len, bsz * self.num_heads, self.head_dim).transpose(0, 1)

        attn_weights = torch.bmm(q, k.transpose(1, 2)).view(bsz, self.num_heads, tgt_len, src_len)
        attn_weights = F.softmax(attn_weights, dim=-1)
        if key_padding_mask is not None:
            attn_weights = attn_weights.masked_fill(key_padding_mask[:, None, None, :], 0.0)
        attn_probs = F.dropout(attn_weights, p=self.dropout, training=self.training)

        attn = torch.bmm(attn_probs.view(bsz * self.num_heads, tgt_len, src_len), v)
        attn = attn.transpose(0, 1).contiguous().view(tgt_len, bsz, embed_dim)
        return self.out_proj(attn), attn_weights


def run(m, x, memory, memory_mask=None):
    padded = None if memory_mask is None else ~memory_mask
    y, weights = m(x.transpose(0, 1), memory.transpose(0, 1), padded)
    return y.transpose(0, 1), weights


subject = Subject(
    kind="cross_attention",
    name="EncoderDecoderAttention",
    build=lambda c: EncoderDecoderAttention(c.d_model, c.num_heads, c.dropout),
    forward=lambda m, x, memory, memory_mask=None: run(m, x, memory, memory_mask)[0],
    weights=lambda m, x, memory, memory_mask=None: run(m, x, memory, memory_mask)[1],
    projections=lambda m: {
        "q": m.q_proj.weight.data, "k": m.k_proj.weight.data, "v": m.v_proj.weight.data, "o": m.out_proj.weight.data,
        "q_bias": m.q_proj.bias.data, "k_bias": m.k_proj.bias.data, "v_bias": m.v_proj.bias.data,
        "o_bias": m.out_proj.bias.data,
    },
    declares={
        "positions": "none",
        "attention_scale": "1/sqrt(d_head)",
        "bias": True,
        "init": "xavier",
        "empty_row": "mean",
        "memory": "quadratic",
        "residual": False,
    },
)

"""An encoder layer of BART, fairseq style: time first, key_padding_mask True where padded."""

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


class MultiheadAttention(nn.Module):
    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.scaling = self.head_dim**-0.5
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.k_proj = nn.Linear(embed_dim, embed_dim)
        self.v_proj = nn.Linear(embed_dim, embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, x, key_padding_mask=None):
        tgt_len, bsz, embed_dim = x.size()
        shape = (tgt_len, bsz * self.num_heads, self.head_dim)
        q = (self.q_proj(x) * self.scaling).view(shape).transpose(0, 1)
        k = self.k_proj(x).view(shape).transpose(0, 1)
        v = self.v_proj(x).view(shape).transpose(0, 1)
        weights = torch.bmm(q, k.transpose(1, 2))
        if key_padding_mask is not None:
            weights = weights.view(bsz, self.num_heads, tgt_len, tgt_len)
            weights = weights.masked_fill(key_padding_mask[:, None, None, :], torch.finfo(x.dtype).min)
            weights = weights.view(bsz * self.num_heads, tgt_len, tgt_len)
        attn = torch.bmm(F.softmax(weights, dim=-1), v)
        return self.out_proj(attn.transpose(0, 1).reshape(tgt_len, bsz, embed_dim))


class BartEncoderLayer(nn.Module):
    def __init__(self, embed_dim, num_heads, ffn_dim, dropout=0.0):
        super().__init__()
        self.self_attn = MultiheadAttention(embed_dim, num_heads)
        self.self_attn_layer_norm = nn.LayerNorm(embed_dim)
        self.fc1 = nn.Linear(embed_dim, ffn_dim)
        self.fc2 = nn.Linear(ffn_dim, embed_dim)
        self.final_layer_norm = nn.LayerNorm(embed_dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, padding_mask=None):
        residual = x
        x = self.self_attn(x, key_padding_mask=padding_mask)
        x = residual + self.dropout(x)
        x = self.self_attn_layer_norm(x)

        residual = x
        x = F.gelu(self.fc1(x))
        x = self.fc2(x)
        x = residual + self.dropout(x)
        x = self.final_layer_norm(x)
        return x


def forward(layer, x, attention_mask=None):
    padding = None if attention_mask is None else ~attention_mask
    return layer(x.transpose(0, 1), padding).transpose(0, 1)


subject = Subject(
    kind="layer",
    name="BART encoder layer",
    build=lambda c: BartEncoderLayer(c.d_model, c.num_heads, c.d_ff, c.dropout),
    forward=forward,
    declares={
        "causal": False,
        "positions": "none",
        "norm": "layer",
        "norm_placement": "post",
        "activation": "gelu",
        "bias": True,
        "residual": True,
    },
)

WHAT = "`residual = x` is missing before the feed-forward: its skip connection adds the layer's input, so that what attention gave reaches the output through the feed-forward alone (line 51)"
"""An encoder layer in fairseq's manner, normalize_before."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class MultiheadAttention(nn.Module):
    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, embed_dim // num_heads
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.k_proj = nn.Linear(embed_dim, embed_dim)
        self.v_proj = nn.Linear(embed_dim, embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, x, key_padding_mask=None):
        bsz, tgt_len, embed_dim = x.size()
        heads = lambda y: y.view(bsz, tgt_len, self.num_heads, self.head_dim).transpose(1, 2)  # noqa: E731
        q, k, v = heads(self.q_proj(x)), heads(self.k_proj(x)), heads(self.v_proj(x))
        attn = torch.matmul(q * self.head_dim**-0.5, k.transpose(-1, -2))
        if key_padding_mask is not None:
            attn = attn.masked_fill(key_padding_mask[:, None, None, :], torch.finfo(attn.dtype).min)
        attn = torch.matmul(F.softmax(attn, dim=-1), v)
        return self.out_proj(attn.transpose(1, 2).reshape(bsz, tgt_len, embed_dim))


class TransformerEncoderLayer(nn.Module):
    def __init__(self, embed_dim, ffn_dim, num_heads, dropout=0.0):
        super().__init__()
        self.self_attn = MultiheadAttention(embed_dim, num_heads)
        self.self_attn_layer_norm = nn.LayerNorm(embed_dim)
        self.fc1 = nn.Linear(embed_dim, ffn_dim)
        self.fc2 = nn.Linear(ffn_dim, embed_dim)
        self.final_layer_norm = nn.LayerNorm(embed_dim)
        self.dropout_module = nn.Dropout(dropout)

    def residual_connection(self, x, residual):
        return residual + x

    def forward(self, x, encoder_padding_mask=None):
        residual = x
        x = self.self_attn_layer_norm(x)
        x = self.self_attn(x, key_padding_mask=encoder_padding_mask)
        x = self.dropout_module(x)
        x = self.residual_connection(x, residual)

        x = self.final_layer_norm(x)
        x = F.relu(self.fc1(x))
        x = self.fc2(x)
        x = self.dropout_module(x)
        x = self.residual_connection(x, residual)
        return x


subject = Subject(
    kind="layer",
    name="fairseq encoder layer",
    build=lambda c: TransformerEncoderLayer(c.d_model, c.d_ff, c.num_heads, c.dropout),
    forward=lambda model, x, attention_mask=None: model(x, None if attention_mask is None else ~attention_mask),
    declares={
        "causal": False,
        "positions": "none",
        "norm": "layer",
        "norm_placement": "pre",
        "residual": True,
        "activation": "relu",
        "bias": True,
        "stacked": False,
    },
)

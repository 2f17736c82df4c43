WHAT = "`residual` is not taken anew before the feed-forward sublayer, so that its skip adds the input of the whole layer and the attention sublayer is bypassed (line 54, behind the first norm)."
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class MultiheadAttention(nn.Module):
    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.scaling = self.head_dim ** -0.5
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.k_proj = nn.Linear(embed_dim, embed_dim)
        self.v_proj = nn.Linear(embed_dim, embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, query, key_padding_mask=None):
        bsz, tgt_len, embed_dim = query.size()

        def shape(t):
            return t.reshape(bsz, tgt_len, self.num_heads, self.head_dim).transpose(1, 2)

        q = shape(self.q_proj(query) * self.scaling)
        k, v = shape(self.k_proj(query)), shape(self.v_proj(query))
        attn_weights = torch.matmul(q, k.transpose(2, 3))
        if key_padding_mask is not None:
            attn_weights = attn_weights.masked_fill(key_padding_mask[:, None, None, :], torch.finfo(q.dtype).min)
        attn = torch.matmul(F.softmax(attn_weights, dim=-1), v)
        return self.out_proj(attn.transpose(1, 2).reshape(bsz, tgt_len, embed_dim))


class TransformerEncoderLayer(nn.Module):
    """After fairseq, with normalize_before=False."""

    def __init__(self, embed_dim, ffn_dim, heads, dropout):
        super().__init__()
        self.self_attn = MultiheadAttention(embed_dim, heads)
        self.self_attn_layer_norm = nn.LayerNorm(embed_dim)
        self.dropout_module = nn.Dropout(dropout)
        self.fc1 = nn.Linear(embed_dim, ffn_dim)
        self.fc2 = nn.Linear(ffn_dim, embed_dim)
        self.final_layer_norm = nn.LayerNorm(embed_dim)

    def forward(self, x, encoder_padding_mask=None):
        residual = x
        x = self.self_attn(x, key_padding_mask=encoder_padding_mask)
        x = self.dropout_module(x)
        x = residual + x
        x = self.self_attn_layer_norm(x)

        x = F.relu(self.fc1(x))
        x = self.fc2(x)
        x = self.dropout_module(x)
        x = residual + x
        x = self.final_layer_norm(x)
        return x


subject = Subject(
    kind="layer",
    build=lambda c: TransformerEncoderLayer(c.d_model, c.d_ff, c.num_heads, c.dropout),
    forward=lambda model, x, attention_mask=None: model(x, None if attention_mask is None else ~attention_mask),
    declares={
        "causal": False,
        "positions": "none",
        "norm": "layer",
        "norm_placement": "post",
        "residual": True,
        "activation": "relu",
        "bias": True,
    },
)

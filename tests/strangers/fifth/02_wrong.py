"""An encoder layer in the style of fairseq: post-LN, time first inside, padding mask says True = padding."""

import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject


class MultiheadAttention(nn.Module):
    def __init__(self, embed_dim, num_heads, dropout=0.0):
        super().__init__()
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.scaling = self.head_dim**-0.5
        self.dropout = dropout
        self.k_proj = nn.Linear(embed_dim, embed_dim)
        self.v_proj = nn.Linear(embed_dim, embed_dim)
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, query, key_padding_mask=None):
        tgt_len, bsz, embed_dim = query.size()
        q = self.q_proj(query) * self.scaling
        k = self.k_proj(query)
        v = self.v_proj(query)
        q = q.contiguous().view(tgt_len, bsz * self.num_heads, self.head_dim).transpose(0, 1)
        k = k.contiguous().view(tgt_len, bsz * self.num_heads, self.head_dim).transpose(0, 1)
        v = v.contiguous().view(tgt_len, bsz * self.num_heads, self.head_dim).transpose(0, 1)
        attn_weights = torch.bmm(q, k.transpose(1, 2))
        if key_padding_mask is not None:
            attn_weights = attn_weights.view(bsz, self.num_heads, tgt_len, tgt_len)
            attn_weights = attn_weights.masked_fill(
                key_padding_mask.unsqueeze(1).unsqueeze(2), torch.finfo(attn_weights.dtype).min
            )
            attn_weights = attn_weights.view(bsz * self.num_heads, tgt_len, tgt_len)
        attn_probs = F.softmax(attn_weights, dim=-1)
        attn_probs = F.dropout(attn_probs, p=self.dropout, training=self.training)
        attn = torch.bmm(attn_probs, v)
        attn = attn.transpose(0, 1).contiguous().view(tgt_len, bsz, embed_dim)
        return self.out_proj(attn)


class TransformerEncoderLayer(nn.Module):
    def __init__(self, embed_dim, attention_heads, ffn_embed_dim, dropout, attention_dropout, activation_dropout):
        super().__init__()
        self.self_attn = MultiheadAttention(embed_dim, attention_heads, dropout=attention_dropout)
        self.self_attn_layer_norm = nn.LayerNorm(embed_dim)
        self.dropout = dropout
        self.activation_dropout = activation_dropout
        self.fc1 = nn.Linear(embed_dim, ffn_embed_dim)
        self.fc2 = nn.Linear(ffn_embed_dim, embed_dim)
        self.final_layer_norm = nn.LayerNorm(embed_dim)

    def forward(self, x, encoder_padding_mask=None):
        residual = x
        x = self.self_attn(x, key_padding_mask=encoder_padding_mask)
        x = F.dropout(x, p=self.dropout, training=self.training)
        x = residual + x
        x = self.self_attn_layer_norm(x)

        residual = x
        x = F.relu(self.fc1(x))
        x = F.dropout(x, p=self.activation_dropout)
        x = self.fc2(x)
        x = F.dropout(x, p=self.dropout, training=self.training)
        x = residual + x
        x = self.final_layer_norm(x)
        return x


def forward(model, x, attention_mask=None):
    padding = None if attention_mask is None else ~attention_mask
    return model(x.transpose(0, 1), padding).transpose(0, 1)


def projections(model):
    a = model.self_attn
    return {
        "q": a.q_proj.weight,
        "k": a.k_proj.weight,
        "v": a.v_proj.weight,
        "o": a.out_proj.weight,
        "q_bias": a.q_proj.bias,
        "k_bias": a.k_proj.bias,
        "v_bias": a.v_proj.bias,
        "o_bias": a.out_proj.bias,
    }


subject = Subject(
    kind="layer",
    name="fairseq encoder layer",
    build=lambda c: TransformerEncoderLayer(c.d_model, c.num_heads, c.d_ff, c.dropout, c.dropout, c.dropout),
    forward=forward,
    mask_forms=("padding",),
    projections=projections,
    declares={
        "causal": False,
        "positions": "none",
        "norm": "layer",
        "norm_placement": "post",
        "norm_bias": True,
        "residual": True,
        "activation": "relu",
        "bias": True,
        "attention_scale": "1/sqrt(d_head)",
        "padding_side": "both",
        "structure": "textbook",
        "init": "default",
    },
)

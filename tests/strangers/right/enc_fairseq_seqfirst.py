"""fairseq style encoder: [T, B, C] inside, embeddings times sqrt(C), sinusoids of positions counted over real tokens.

Unusual: fairseq's sinusoids put all sines before all cosines and spread the wavelengths over half - 1 steps; position 0 is
padding_idx + 1 = 2, and padding has a zero vector for a position. Since positions are counted by the mask, padding may
stand on either side. Embeddings at padding are zeroed before the first layer. Attention is one bmm over B * H.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject

PADDING_IDX = 1


def make_positions(real):
    return torch.cumsum(real.int(), dim=1) * real.int() + PADDING_IDX


def get_embedding(num_embeddings, embedding_dim, like):
    half_dim = embedding_dim // 2
    emb = math.log(10000) / max(1, half_dim - 1)
    emb = torch.exp(torch.arange(half_dim, dtype=torch.float64, device=like.device) * -emb)
    emb = torch.arange(num_embeddings, dtype=torch.float64, device=like.device).unsqueeze(1) * emb.unsqueeze(0)
    emb = torch.cat([torch.sin(emb), torch.cos(emb)], dim=1)
    if embedding_dim % 2 == 1:
        emb = torch.cat([emb, emb.new_zeros(num_embeddings, 1)], dim=1)
    emb[PADDING_IDX, :] = 0
    return emb.to(like.dtype)


class MultiheadAttention(nn.Module):
    """Input shape: Time x Batch x Channel."""

    def __init__(self, embed_dim, num_heads, dropout):
        super().__init__()
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.head_dim = embed_dim // num_heads
        self.scaling = self.head_dim**-0.5
        self.dropout = dropout
        self.in_proj_weight = nn.Parameter(torch.empty(3 * embed_dim, embed_dim))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * embed_dim))
        self.out_proj = nn.Linear(embed_dim, embed_dim)
        nn.init.xavier_uniform_(self.in_proj_weight)

    def forward(self, query, key_padding_mask):
        tgt_len, bsz, embed_dim = query.size()
        q, k, v = F.linear(query, self.in_proj_weight, self.in_proj_bias).chunk(3, dim=-1)
        q = q * self.scaling
        q = q.contiguous().view(tgt_len, bsz * self.num_heads, self.head_dim).transpose(0, 1)
        k = k.contiguous().view(tgt_len, bsz * self.num_heads, self.head_dim).transpose(0, 1)
        v = v.contiguous().view(tgt_len, bsz * self.num_heads, self.head_dim).transpose(0, 1)
        attn_weights = torch.bmm(q, k.transpose(1, 2))
        if key_padding_mask is not None:
            attn_weights = attn_weights.view(bsz, self.num_heads, tgt_len, tgt_len)
            nothing_left = key_padding_mask.all(dim=1)[:, None, None, None]
            blocked = key_padding_mask[:, None, None, :]
            attn_weights = attn_weights.masked_fill(blocked & ~nothing_left, float("-inf"))
            attn_weights = attn_weights.view(bsz * self.num_heads, tgt_len, tgt_len)
        attn_weights = F.softmax(attn_weights, dim=-1)
        attn_weights = F.dropout(attn_weights, p=self.dropout, training=self.training)
        attn = torch.bmm(attn_weights, v)
        attn = attn.transpose(0, 1).contiguous().view(tgt_len, bsz, embed_dim)
        return self.out_proj(attn)


class TransformerEncoderLayer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.dropout = c.dropout
        self.self_attn = MultiheadAttention(c.d_model, c.num_heads, c.dropout)
        self.self_attn_layer_norm = nn.LayerNorm(c.d_model)
        self.fc1 = nn.Linear(c.d_model, c.d_ff)
        self.fc2 = nn.Linear(c.d_ff, c.d_model)
        self.final_layer_norm = nn.LayerNorm(c.d_model)

    def forward(self, x, encoder_padding_mask):
        residual = x
        x = self.self_attn(x, encoder_padding_mask)
        x = F.dropout(x, p=self.dropout, training=self.training)
        x = self.self_attn_layer_norm(residual + x)
        residual = x
        x = F.relu(self.fc1(x))
        x = self.fc2(x)
        x = F.dropout(x, p=self.dropout, training=self.training)
        return self.final_layer_norm(residual + x)


class TransformerEncoder(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.d_model)
        nn.init.normal_(self.embed_tokens.weight, mean=0, std=c.d_model**-0.5)
        self.embed_scale = math.sqrt(c.d_model)
        self.layers = nn.ModuleList([TransformerEncoderLayer(c) for _ in range(c.num_layers)])
        self.dropout = c.dropout

    def forward(self, src_tokens, real=None):
        if real is None:
            real = torch.ones_like(src_tokens, dtype=torch.bool)
        x = self.embed_scale * self.embed_tokens(src_tokens)
        table = get_embedding(PADDING_IDX + 1 + src_tokens.size(1), x.size(-1), x)
        x = x + table[make_positions(real).long()]
        x = F.dropout(x, p=self.dropout, training=self.training)
        encoder_padding_mask = ~real if not bool(real.all()) else None
        if encoder_padding_mask is not None:
            x = x * real.unsqueeze(-1).type_as(x)
        x = x.transpose(0, 1)  # B x T x C -> T x B x C
        for layer in self.layers:
            x = layer(x, encoder_padding_mask)
        return x.transpose(0, 1)


COMMON = dict(
    kind="encoder",
    build=TransformerEncoder,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    mask_forms=("padding",),
)
undeclared = Subject(**COMMON)
declared = Subject(
    **COMMON,
    declares={
        "causal": False,
        "positions": "sinusoidal",
        "layout": "halves",
        "padding_side": "both",
        "norm": "layer",
        "norm_placement": "post",
        "final_norm": False,
        "activation": "relu",
        "bias": True,
        "embedding_scale": True,
    },
)

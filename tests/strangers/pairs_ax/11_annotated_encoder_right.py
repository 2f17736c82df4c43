"""A post-norm encoder in the manner of the annotated Transformer."""

import math

import torch
import torch.nn as nn

from veriformer.properties import Subject


def attention(query, key, value, mask=None, dropout=None):
    "Compute 'Scaled Dot Product Attention'"
    scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(query.size(-1))
    if mask is not None:
        hidden = mask.logical_not()
        scores = scores + hidden.to(scores.dtype) * torch.finfo(scores.dtype).min
    p_attn = scores.softmax(dim=-1)
    if dropout is not None:
        p_attn = dropout(p_attn)
    return torch.matmul(p_attn, value)


class MultiHeadedAttention(nn.Module):
    def __init__(self, h, d_model, dropout):
        super().__init__()
        self.d_k = d_model // h
        self.h = h
        self.linears = nn.ModuleList([nn.Linear(d_model, d_model) for _ in range(4)])
        self.dropout = nn.Dropout(p=dropout)

    def forward(self, query, key, value, mask=None):
        nbatches = query.size(0)
        query, key, value = (
            lin(x).view(nbatches, -1, self.h, self.d_k).transpose(1, 2)
            for lin, x in zip(self.linears, (query, key, value))
        )
        x = attention(query, key, value, mask, self.dropout)
        x = x.transpose(1, 2).contiguous().view(nbatches, -1, self.h * self.d_k)
        return self.linears[-1](x)


class EncoderLayer(nn.Module):
    def __init__(self, d_model, h, d_ff, dropout):
        super().__init__()
        self.self_attn = MultiHeadedAttention(h, d_model, dropout)
        self.feed_forward = nn.Sequential(nn.Linear(d_model, d_ff), nn.ReLU(), nn.Linear(d_ff, d_model))
        self.norms = nn.ModuleList([nn.LayerNorm(d_model) for _ in range(2)])
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, mask):
        x = self.norms[0](x + self.dropout(self.self_attn(x, x, x, mask)))
        return self.norms[1](x + self.dropout(self.feed_forward(x)))


class PositionalEncoding(nn.Module):
    def __init__(self, d_model, max_len):
        super().__init__()
        pe = torch.zeros(max_len, d_model)
        position = torch.arange(0, max_len).unsqueeze(1)
        div_term = torch.exp(torch.arange(0, d_model, 2) * -(math.log(10000.0) / d_model))
        pe[:, 0::2] = torch.sin(position * div_term)
        pe[:, 1::2] = torch.cos(position * div_term)[:, : d_model // 2]
        self.register_buffer("pe", pe.unsqueeze(0), persistent=False)

    def forward(self, x):
        return x + self.pe[:, : x.size(1)]


class Encoder(nn.Module):
    def __init__(self, vocab, d_model, h, d_ff, n, max_len, dropout):
        super().__init__()
        self.lut = nn.Embedding(vocab, d_model)
        self.position = PositionalEncoding(d_model, max_len)
        self.layers = nn.ModuleList([EncoderLayer(d_model, h, d_ff, dropout) for _ in range(n)])
        self.d_model = d_model

    def forward(self, src, src_mask=None):
        if src_mask is not None:
            src_mask = (src_mask != 0)[:, None, None, :]
        x = self.position(self.lut(src) * math.sqrt(self.d_model))
        for layer in self.layers:
            x = layer(x, src_mask)
        return x


subject = Subject(
    kind="encoder",
    name="annotated encoder",
    build=lambda c: Encoder(c.vocab_size, c.d_model, c.num_heads, c.d_ff, c.num_layers, c.max_len, c.dropout),
    forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask),
    declares={
        "causal": False,
        "positions": "sinusoidal",
        "embedding_scale": True,
        "norm": "layer",
        "norm_placement": "post",
        "activation": "relu",
        "padding_side": "right",
    },
)

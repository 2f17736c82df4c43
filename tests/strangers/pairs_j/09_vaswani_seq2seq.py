"""The Transformer of 2017, as tutorials write it."""

import math

import torch
import torch.nn as nn

from veriformer.properties import Subject

WHAT = "the padding mask of the source is used in the encoder alone: cross-attention sees padded memory"
CAUSE = (
    "The source padding mask is not passed on to the cross-attention of the decoder, so that padded positions of the "
    "memory are attended to; the encoder itself masks them."
)


def attention(query, key, value, mask=None, dropout=None):
    d_k = query.size(-1)
    scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(d_k)
    if mask is not None:
        scores = scores.masked_fill(mask == 0, torch.finfo(scores.dtype).min)
    p_attn = scores.softmax(dim=-1)
    if dropout is not None:
        p_attn = dropout(p_attn)
    return torch.matmul(p_attn, value)


class MultiHeadedAttention(nn.Module):
    def __init__(self, h, d_model, dropout):
        super().__init__()
        self.d_k, self.h = d_model // h, h
        self.linears = nn.ModuleList([nn.Linear(d_model, d_model) for _ in range(4)])
        self.dropout = nn.Dropout(p=dropout)

    def forward(self, query, key, value, mask=None):
        nbatches = query.size(0)
        query, key, value = [
            lin(x).view(nbatches, -1, self.h, self.d_k).transpose(1, 2)
            for lin, x in zip(self.linears, (query, key, value))
        ]
        x = attention(query, key, value, mask, self.dropout)
        x = x.transpose(1, 2).contiguous().view(nbatches, -1, self.h * self.d_k)
        return self.linears[-1](x)


class PositionwiseFeedForward(nn.Module):
    def __init__(self, d_model, d_ff, dropout):
        super().__init__()
        self.w_1, self.w_2 = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return self.w_2(self.dropout(self.w_1(x).relu()))


class PositionalEncoding(nn.Module):
    def __init__(self, d_model, dropout, max_len):
        super().__init__()
        self.dropout = nn.Dropout(p=dropout)
        pe = torch.zeros(max_len, d_model)
        position = torch.arange(0, max_len).unsqueeze(1).double()
        div_term = torch.exp(torch.arange(0, d_model, 2).double() * -(math.log(10000.0) / d_model))
        pe[:, 0::2] = torch.sin(position * div_term).float()
        pe[:, 1::2] = torch.cos(position * div_term)[:, : d_model // 2].float()
        self.register_buffer("pe", pe.unsqueeze(0))

    def forward(self, x):
        if x.size(1) > self.pe.size(1):
            raise ValueError("sequence longer than max_len")
        return self.dropout(x + self.pe[:, : x.size(1)])


class EncoderLayer(nn.Module):
    def __init__(self, d_model, h, d_ff, dropout):
        super().__init__()
        self.self_attn = MultiHeadedAttention(h, d_model, dropout)
        self.feed_forward = PositionwiseFeedForward(d_model, d_ff, dropout)
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, mask):
        x = self.norm1(x + self.dropout(self.self_attn(x, x, x, mask)))
        return self.norm2(x + self.dropout(self.feed_forward(x)))


class DecoderLayer(nn.Module):
    def __init__(self, d_model, h, d_ff, dropout):
        super().__init__()
        self.self_attn = MultiHeadedAttention(h, d_model, dropout)
        self.src_attn = MultiHeadedAttention(h, d_model, dropout)
        self.feed_forward = PositionwiseFeedForward(d_model, d_ff, dropout)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(d_model) for _ in range(3))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, memory, src_mask, tgt_mask):
        x = self.norm1(x + self.dropout(self.self_attn(x, x, x, tgt_mask)))
        x = self.norm2(x + self.dropout(self.src_attn(x, memory, memory, src_mask)))
        return self.norm3(x + self.dropout(self.feed_forward(x)))


class Transformer(nn.Module):
    def __init__(self, vocab, N, d_model, d_ff, h, dropout, max_len):
        super().__init__()
        self.d_model = d_model
        self.src_embed, self.tgt_embed = nn.Embedding(vocab, d_model), nn.Embedding(vocab, d_model)
        self.position = PositionalEncoding(d_model, dropout, max_len)
        self.encoder = nn.ModuleList([EncoderLayer(d_model, h, d_ff, dropout) for _ in range(N)])
        self.decoder = nn.ModuleList([DecoderLayer(d_model, h, d_ff, dropout) for _ in range(N)])
        self.generator = nn.Linear(d_model, vocab)

    def encode(self, src, src_mask):
        x = self.position(self.src_embed(src) * math.sqrt(self.d_model))
        for layer in self.encoder:
            x = layer(x, src_mask)
        return x

    def decode(self, memory, src_mask, tgt, tgt_mask):
        x = self.position(self.tgt_embed(tgt) * math.sqrt(self.d_model))
        for layer in self.decoder:
            x = layer(x, memory, src_mask, tgt_mask)
        return self.generator(x)

    def forward(self, src, tgt, src_pad=None, tgt_pad=None):
        src_mask = None if src_pad is None else src_pad[:, None, None, :]
        T = tgt.size(1)
        tgt_mask = torch.ones(T, T, dtype=torch.bool, device=tgt.device).tril()[None, None]
        if tgt_pad is not None:
            tgt_mask = tgt_mask & tgt_pad[:, None, None, :]
        return self.decode(self.encode(src, src_mask), src_mask, tgt, tgt_mask)


class EncoderDecoder(Transformer):
    def decode(self, memory, src_mask, tgt, tgt_mask):
        x = self.position(self.tgt_embed(tgt) * math.sqrt(self.d_model))
        for layer in self.decoder:
            x = layer(x, memory, None, tgt_mask)
        return self.generator(x)


def subject(model):
    return Subject(
        kind="encoder_decoder",
        name="Transformer of 2017",
        build=lambda c: model(c.vocab_size, c.num_layers, c.d_model, c.d_ff, c.num_heads, c.dropout, c.max_len),
        forward=lambda m, source, target, source_mask=None, target_mask=None: m(
            source, target, source_mask, target_mask
        ),
        declares={
            "causal": True,
            "positions": "sinusoidal",
            "norm": "layer",
            "norm_placement": "post",
            "activation": "relu",
            "embedding_scale": True,
            "padding_side": "right",
            "tied": False,
        },
    )


right = subject(Transformer)
wrong = subject(EncoderDecoder)

"""The Annotated Transformer: clones, sublayer connections (norm first), sinusoids, Xavier."""
import copy
import math

import torch
from torch import nn

from veriformer.properties import DrawnConfig, Subject


def clones(module, n):
    return nn.ModuleList([copy.deepcopy(module) for _ in range(n)])


def subsequent_mask(size, device=None):
    return torch.triu(torch.ones(1, size, size, device=device), diagonal=1) == 0


def attention(query, key, value, mask=None, dropout=None):
    d_k = query.size(-1)
    scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(d_k)
    if mask is not None:
        scores = scores.masked_fill(mask == 0, torch.finfo(scores.dtype).min)
    p_attn = scores.softmax(dim=-1)
    if dropout is not None:
        p_attn = dropout(p_attn)
    return torch.matmul(p_attn, value), p_attn


class MultiHeadedAttention(nn.Module):
    def __init__(self, h, d_model, dropout):
        super().__init__()
        self.d_k, self.h = d_model // h, h
        self.linears = clones(nn.Linear(d_model, d_model), 4)
        self.dropout = nn.Dropout(dropout)

    def forward(self, query, key, value, mask=None):
        if mask is not None:
            mask = mask.unsqueeze(1)
        n = query.size(0)
        query, key, value = [
            lin(x).view(n, -1, self.h, self.d_k).transpose(1, 2)
            for lin, x in zip(self.linears, (query, key, value))
        ]
        x, _ = attention(query, key, value, mask=mask, dropout=self.dropout)
        x = x.transpose(1, 2).contiguous().view(n, -1, self.h * self.d_k)
        return self.linears[-1](x)


class PositionwiseFeedForward(nn.Module):
    def __init__(self, d_model, d_ff, dropout):
        super().__init__()
        self.w_1, self.w_2 = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return self.w_2(self.dropout(self.w_1(x).relu()))


class SublayerConnection(nn.Module):
    def __init__(self, size, dropout):
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, sublayer):
        return x + self.dropout(sublayer(self.norm(x)))


class EncoderLayer(nn.Module):
    def __init__(self, size, self_attn, feed_forward, dropout):
        super().__init__()
        self.self_attn, self.feed_forward = self_attn, feed_forward
        self.sublayer = clones(SublayerConnection(size, dropout), 2)

    def forward(self, x, mask):
        x = self.sublayer[0](x, lambda x: self.self_attn(x, x, x, mask))
        return self.sublayer[1](x, self.feed_forward)


class DecoderLayer(nn.Module):
    def __init__(self, size, self_attn, src_attn, feed_forward, dropout):
        super().__init__()
        self.self_attn, self.src_attn, self.feed_forward = self_attn, src_attn, feed_forward
        self.sublayer = clones(SublayerConnection(size, dropout), 3)

    def forward(self, x, memory, src_mask, tgt_mask):
        x = self.sublayer[0](x, lambda x: self.self_attn(x, x, x, tgt_mask))
        x = self.sublayer[1](x, lambda x: self.src_attn(x, memory, memory, src_mask))
        return self.sublayer[2](x, self.feed_forward)


class PositionalEncoding(nn.Module):
    def __init__(self, d_model, dropout):
        super().__init__()
        self.d_model, self.dropout = d_model, nn.Dropout(dropout)

    def forward(self, x):
        position = torch.arange(x.size(1), device=x.device, dtype=torch.float64).unsqueeze(1)
        div = torch.exp(
            torch.arange(0, self.d_model, 2, device=x.device, dtype=torch.float64)
            * -(math.log(10000.0) / self.d_model)
        )
        pe = torch.zeros(x.size(1), self.d_model, device=x.device, dtype=torch.float64)
        pe[:, 0::2] = torch.sin(position * div)
        pe[:, 1::2] = torch.cos(position * div)[:, : self.d_model // 2]
        return self.dropout(x + pe.to(x.dtype))


class Embeddings(nn.Module):
    def __init__(self, d_model, vocab):
        super().__init__()
        self.lut, self.d_model = nn.Embedding(vocab, d_model), d_model

    def forward(self, x):
        return self.lut(x) * math.sqrt(self.d_model)


class Stack(nn.Module):
    def __init__(self, layer, n, size):
        super().__init__()
        self.layers, self.norm = clones(layer, n), nn.LayerNorm(size)

    def forward(self, x, *masks):
        for layer in self.layers:
            x = layer(x, *masks)
        return self.norm(x)


class EncoderDecoder(nn.Module):
    def __init__(self, vocab, n, d_model, d_ff, h, dropout):
        super().__init__()
        attn = MultiHeadedAttention(h, d_model, dropout)
        ff = PositionwiseFeedForward(d_model, d_ff, dropout)
        c = copy.deepcopy
        self.encoder = Stack(EncoderLayer(d_model, c(attn), c(ff), dropout), n, d_model)
        self.decoder = Stack(DecoderLayer(d_model, c(attn), c(attn), c(ff), dropout), n, d_model)
        self.src_embed = nn.Sequential(Embeddings(d_model, vocab), PositionalEncoding(d_model, dropout))
        self.tgt_embed = nn.Sequential(Embeddings(d_model, vocab), PositionalEncoding(d_model, dropout))
        self.generator = nn.Linear(d_model, vocab)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.xavier_uniform_(p)

    def forward(self, src, tgt, src_mask=None, tgt_mask=None):
        if src_mask is None:
            src_mask = torch.ones_like(src, dtype=torch.bool)
        if tgt_mask is None:
            tgt_mask = torch.ones_like(tgt, dtype=torch.bool)
        src_mask = src_mask.bool().unsqueeze(-2)
        tgt_mask = tgt_mask.bool().unsqueeze(-2) & subsequent_mask(tgt.size(-1), tgt.device)
        memory = self.encoder(self.src_embed(src), src_mask)
        return self.generator(self.decoder(self.tgt_embed(tgt), memory, src_mask, tgt_mask))


def build(c: DrawnConfig):
    return EncoderDecoder(c.vocab_size, c.num_layers, c.d_model, c.d_ff, c.num_heads, c.dropout)


def forward(model, source, target, source_mask=None, target_mask=None):
    return model(source, target, source_mask, target_mask)


declared = Subject(
    kind="encoder_decoder", name="annotated seq2seq", build=build, forward=forward,
    declares={
        "causal": True, "positions": "sinusoidal", "layout": "interleaved", "norm": "layer", "norm_placement": "pre",
        "final_norm": True, "residual": True, "activation": "relu", "bias": True, "output_bias": True, "init": "xavier",
        "tied": False, "embedding_scale": True, "padding_side": "right", "beyond_max_len": "works",
        "attention_scale": "1/sqrt(d_head)",
    },
)
undeclared = Subject(kind="encoder_decoder", build=build, forward=forward)

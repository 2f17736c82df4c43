"""Attention Is All You Need, line by line."""

import copy
import math

import torch
import torch.nn as nn
from torch.nn.functional import softmax

from veriformer.properties import Subject


def clones(module, N):
    "Produce N identical layers."
    return nn.ModuleList([copy.deepcopy(module) for _ in range(N)])


class LayerNorm(nn.Module):
    "Construct a layernorm module (https://arxiv.org/abs/1607.06450)."

    def __init__(self, features, eps=1e-6):
        super().__init__()
        self.a_2 = nn.Parameter(torch.ones(features))
        self.b_2 = nn.Parameter(torch.zeros(features))
        self.eps = eps

    def forward(self, x):
        mean = x.mean(-1, keepdim=True)
        var = x.var(-1, keepdim=True, unbiased=False)
        return self.a_2 * (x - mean) / torch.sqrt(var + self.eps) + self.b_2


class SublayerConnection(nn.Module):
    "A residual connection followed by a layer norm."

    def __init__(self, size, dropout):
        super().__init__()
        self.norm = LayerNorm(size)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, sublayer):
        return self.norm(x + self.dropout(sublayer(x)))


def attention(query, key, value, mask):
    "Compute 'Scaled Dot Product Attention'"
    d_k = query.size(-1)
    scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(d_k)
    scores = scores.masked_fill(mask == 0, torch.finfo(scores.dtype).min)
    return torch.matmul(softmax(scores, dim=-1).to(value.dtype), value)


class MultiHeadedAttention(nn.Module):
    def __init__(self, h, d_model):
        super().__init__()
        assert d_model % h == 0
        self.d_k = d_model // h
        self.h = h
        self.linears = clones(nn.Linear(d_model, d_model), 4)

    def forward(self, query, key, value, mask):
        mask = mask.unsqueeze(1)  # the same for all h heads
        nbatches = query.size(0)
        query, key, value = [
            lin(x).view(nbatches, -1, self.h, self.d_k).transpose(1, 2)
            for lin, x in zip(self.linears, (query, key, value))
        ]
        x = attention(query, key, value, mask)
        x = x.transpose(1, 2).contiguous().view(nbatches, -1, self.h * self.d_k)
        return self.linears[-1](x)


class PositionwiseFeedForward(nn.Module):
    "FFN(x) = max(0, x W_1 + b_1) W_2 + b_2"

    def __init__(self, d_model, d_ff):
        super().__init__()
        self.w_1 = nn.Linear(d_model, d_ff)
        self.w_2 = nn.Linear(d_ff, d_model)

    def forward(self, x):
        return self.w_2(self.w_1(x).relu())


class EncoderLayer(nn.Module):
    "Encoder is made up of self-attn and feed forward."

    def __init__(self, size, self_attn, feed_forward, dropout):
        super().__init__()
        self.self_attn = self_attn
        self.feed_forward = feed_forward
        self.sublayer = clones(SublayerConnection(size, dropout), 2)

    def forward(self, x, mask):
        x = self.sublayer[0](x, lambda x: self.self_attn(x, x, x, mask))
        return self.sublayer[1](x, self.feed_forward)


class DecoderLayer(nn.Module):
    "Decoder is made of self-attn, src-attn, and feed forward."

    def __init__(self, size, self_attn, src_attn, feed_forward, dropout):
        super().__init__()
        self.self_attn = self_attn
        self.src_attn = src_attn
        self.feed_forward = feed_forward
        self.sublayer = clones(SublayerConnection(size, dropout), 3)

    def forward(self, x, memory, src_mask, tgt_mask):
        m = memory
        x = self.sublayer[0](x, lambda x: self.self_attn(x, x, x, tgt_mask))
        x = self.sublayer[1](x, lambda x: self.src_attn(x, m, m, src_mask))
        return self.sublayer[2](x, self.feed_forward)


class PositionalEncoding(nn.Module):
    "Sines on even channels, cosines on odd ones."

    def __init__(self, d_model):
        super().__init__()
        self.d_model = d_model

    def forward(self, x):
        position = torch.arange(x.size(1), device=x.device, dtype=torch.float64).unsqueeze(1)
        channel = torch.arange(0, self.d_model, 2, device=x.device, dtype=torch.float64)
        angle = position * torch.exp(channel * -(math.log(10000.0) / self.d_model))
        pe = torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(1)[:, : self.d_model]
        return x + pe.to(x.dtype)


class EncoderDecoder(nn.Module):
    def __init__(self, vocab, N, d_model, d_ff, h, dropout):
        super().__init__()
        c = copy.deepcopy
        attn = MultiHeadedAttention(h, d_model)
        ff = PositionwiseFeedForward(d_model, d_ff)
        self.d_model = d_model
        self.encoder = clones(EncoderLayer(d_model, c(attn), c(ff), dropout), N)
        self.decoder = clones(DecoderLayer(d_model, c(attn), c(attn), c(ff), dropout), N)
        self.lut = nn.Embedding(vocab, d_model)
        self.position = PositionalEncoding(d_model)
        self.dropout = nn.Dropout(dropout)
        self.generator = nn.Linear(d_model, vocab, bias=False)
        self.generator.weight = self.lut.weight
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.xavier_uniform_(p)
        for m in self.modules():
            if isinstance(m, nn.Linear) and m.bias is not None:
                nn.init.zeros_(m.bias)

    def embed(self, tokens):
        return self.dropout(self.position(self.lut(tokens) * math.sqrt(self.d_model)))

    def forward(self, src, tgt, src_mask=None, tgt_mask=None):
        "src_mask [B, S] and tgt_mask [B, T]: True where a token is real."
        if src_mask is None:
            src_mask = torch.ones_like(src, dtype=torch.bool)
        if tgt_mask is None:
            tgt_mask = torch.ones_like(tgt, dtype=torch.bool)
        src_mask = src_mask.unsqueeze(-2)
        size = tgt.size(1)
        subsequent = torch.triu(torch.ones(1, size, size, device=tgt.device), diagonal=1) == 0
        tgt_mask = tgt_mask.unsqueeze(-2) & subsequent

        memory = self.embed(src)
        for layer in self.encoder:
            memory = layer(memory, src_mask)
        x = self.embed(tgt)
        for layer in self.decoder:
            x = layer(x, memory, src_mask, tgt_mask)
        return self.generator(x)


def make_model(c):
    return EncoderDecoder(c.vocab_size, c.num_layers, c.d_model, c.d_ff, c.num_heads, c.dropout)


subject = Subject(
    kind="encoder_decoder",
    name="the annotated one",
    build=make_model,
    forward=lambda model, source, target, source_mask=None, target_mask=None: model(
        source, target, source_mask, target_mask
    ),
    declares={
        "causal": True,
        "positions": "sinusoidal",
        "layout": "interleaved",
        "base": 10000,
        "norm": "layer",
        "norm_placement": "post",
        "norm_bias": True,
        "final_norm": False,
        "residual": True,
        "activation": "relu",
        "bias": True,
        "output_bias": False,
        "attention_scale": "1/sqrt(d_head)",
        "tied": True,
        "embedding_scale": True,
        "init": "xavier",
        "structure": "textbook",
        "padding_side": "right",
        "beyond_max_len": "works",
        "memory": "quadratic",
    },
)

WHAT = 'around the cross-attention the residual starts from the normalised x (line 84): the stream itself is replaced by its LayerNorm, which is not pre-norm'
# Homework 3: a pre-LN encoder-decoder, after "The Annotated Transformer".
import copy
import math

import torch
import torch.nn as nn

from veriformer.properties import Subject


def clones(module, n):
    layers = nn.ModuleList([copy.deepcopy(module) for _ in range(n)])
    for p in layers.parameters():
        if p.dim() > 1:
            nn.init.xavier_uniform_(p)
    return layers


def attention(query, key, value, mask=None):
    scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(query.size(-1))
    if mask is not None:
        scores = scores.masked_fill(mask == 0, torch.finfo(scores.dtype).min)
    return torch.matmul(scores.softmax(dim=-1), value)


class MultiHeadedAttention(nn.Module):
    def __init__(self, h, d_model):
        super().__init__()
        self.d_k = d_model // h
        self.h = h
        self.linears = clones(nn.Linear(d_model, d_model), 4)

    def forward(self, query, key, value, mask=None):
        if mask is not None:
            mask = mask.unsqueeze(1)
        n = query.size(0)
        query, key, value = [
            lin(x).view(n, -1, self.h, self.d_k).transpose(1, 2)
            for lin, x in zip(self.linears, (query, key, value))
        ]
        x = attention(query, key, value, mask)
        return self.linears[-1](x.transpose(1, 2).reshape(n, -1, self.h * self.d_k))


class FeedForward(nn.Module):
    def __init__(self, d_model, d_ff):
        super().__init__()
        self.w_1 = nn.Linear(d_model, d_ff)
        self.w_2 = nn.Linear(d_ff, d_model)

    def forward(self, x):
        return self.w_2(self.w_1(x).relu())


class EncoderLayer(nn.Module):
    def __init__(self, d_model, h, d_ff, dropout):
        super().__init__()
        self.norm_attn, self.norm_ff = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.attn = MultiHeadedAttention(h, d_model)
        self.ff = FeedForward(d_model, d_ff)
        self.drop = nn.Dropout(dropout)

    def forward(self, x, mask):
        y = self.norm_attn(x)
        x = x + self.drop(self.attn(y, y, y, mask))
        y = self.norm_ff(x)
        x = x + self.drop(self.ff(y))
        return x


class DecoderLayer(nn.Module):
    def __init__(self, d_model, h, d_ff, dropout):
        super().__init__()
        self.norm_attn, self.norm_src, self.norm_ff = (nn.LayerNorm(d_model) for _ in range(3))
        self.attn = MultiHeadedAttention(h, d_model)
        self.src_attn = MultiHeadedAttention(h, d_model)
        self.ff = FeedForward(d_model, d_ff)
        self.drop = nn.Dropout(dropout)

    def forward(self, x, memory, src_mask, tgt_mask):
        y = self.norm_attn(x)
        x = x + self.drop(self.attn(y, y, y, tgt_mask))
        x = self.norm_src(x)
        x = x + self.drop(self.src_attn(x, memory, memory, src_mask))
        y = self.norm_ff(x)
        x = x + self.drop(self.ff(y))
        return x


class PositionalEncoding(nn.Module):
    def __init__(self, d_model, max_len):
        super().__init__()
        position = torch.arange(max_len).unsqueeze(1).double()
        div_term = torch.exp(torch.arange(0, d_model, 2).double() * -(math.log(10000.0) / d_model))
        pe = torch.zeros(max_len, d_model, dtype=torch.float64)
        pe[:, 0::2] = torch.sin(position * div_term)
        pe[:, 1::2] = torch.cos(position * div_term)[:, : d_model // 2]
        self.register_buffer("pe", pe.float().unsqueeze(0), persistent=False)

    def forward(self, x):
        return x + self.pe[:, : x.size(1)]


class Seq2Seq(nn.Module):
    def __init__(self, vocab, d_model, h, n, d_ff, max_len, dropout):
        super().__init__()
        self.src_embed, self.tgt_embed = nn.Embedding(vocab, d_model), nn.Embedding(vocab, d_model)
        self.pos = PositionalEncoding(d_model, max_len)
        self.encoder = nn.ModuleList([EncoderLayer(d_model, h, d_ff, dropout) for _ in range(n)])
        self.decoder = nn.ModuleList([DecoderLayer(d_model, h, d_ff, dropout) for _ in range(n)])
        self.encoder_norm, self.decoder_norm = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.generator = nn.Linear(d_model, vocab)
        self.d_model = d_model

    def encode(self, src, src_mask):
        x = self.pos(self.src_embed(src) * math.sqrt(self.d_model))
        for layer in self.encoder:
            x = layer(x, src_mask)
        return self.encoder_norm(x)

    def decode(self, memory, src_mask, tgt, tgt_mask):
        x = self.pos(self.tgt_embed(tgt) * math.sqrt(self.d_model))
        for layer in self.decoder:
            x = layer(x, memory, src_mask, tgt_mask)
        return self.generator(self.decoder_norm(x))

    def forward(self, src, tgt, src_mask=None, tgt_mask=None):
        if src_mask is not None:
            src_mask = src_mask.unsqueeze(1)  # B, 1, S
        causal = torch.ones(1, tgt.size(1), tgt.size(1), dtype=torch.bool, device=tgt.device).tril()
        tgt_mask = causal if tgt_mask is None else causal & tgt_mask.unsqueeze(1)
        return self.decode(self.encode(src, src_mask), src_mask, tgt, tgt_mask)


subject = Subject(
    kind="encoder_decoder",
    name="pre-LN Seq2Seq",
    build=lambda c: Seq2Seq(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len, c.dropout),
    forward=lambda m, source, target, source_mask=None, target_mask=None: m(source, target, source_mask, target_mask),
    declares={
        "positions": "sinusoidal", "layout": "interleaved", "norm": "layer", "norm_placement": "pre",
        "final_norm": True, "activation": "relu", "embedding_scale": True, "padding_side": "right", "bias": True,
    },
)

WHAT = 'make_model hands one and the same deep copy of the attention to DecoderLayer twice (`own, src = attn_copy, attn_copy`), so self-attention and source attention of every decoder layer are one module with shared weights'
"""After the annotated Transformer."""
import copy
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject


def clones(module, N):
    return nn.ModuleList([copy.deepcopy(module) for _ in range(N)])


def subsequent_mask(size, device):
    return torch.triu(torch.ones(1, 1, size, size, device=device), diagonal=1) == 0


def attention(query, key, value, mask=None):
    d_k = query.size(-1)
    scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(d_k)
    if mask is not None:
        scores = scores.masked_fill(mask == 0, -1e9)
    return torch.matmul(F.softmax(scores, dim=-1), value)


class MultiHeadedAttention(nn.Module):
    def __init__(self, h, d_model):
        super().__init__()
        self.d_k, self.h = d_model // h, h
        self.linears = clones(nn.Linear(d_model, d_model), 4)

    def forward(self, query, key, value, mask=None):
        n = query.size(0)
        query, key, value = [
            lin(x).view(n, -1, self.h, self.d_k).transpose(1, 2) for lin, x in zip(self.linears, (query, key, value))
        ]
        x = attention(query, key, value, mask).transpose(1, 2).contiguous().view(n, -1, self.h * self.d_k)
        return self.linears[-1](x)


class FeedForward(nn.Module):
    def __init__(self, d_model, d_ff):
        super().__init__()
        self.w_1, self.w_2 = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)

    def forward(self, x):
        return self.w_2(self.w_1(x).relu())


class PositionalEncoding(nn.Module):
    def forward(self, x):
        T, d = x.shape[1:]
        position = torch.arange(T, device=x.device, dtype=torch.float64)[:, None]
        div = torch.exp(torch.arange(0, d, 2, device=x.device, dtype=torch.float64) * -(math.log(10000.0) / d))
        pe = torch.zeros(T, d, device=x.device, dtype=torch.float64)
        pe[:, 0::2] = torch.sin(position * div)
        pe[:, 1::2] = torch.cos(position * div)[:, : d // 2]
        return x + pe.to(x.dtype)


class Sublayer(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.norm = nn.LayerNorm(size)

    def forward(self, x, sublayer):
        return x + sublayer(self.norm(x))


class EncoderLayer(nn.Module):
    def __init__(self, size, self_attn, ff):
        super().__init__()
        self.self_attn, self.ff, self.sublayer = self_attn, ff, clones(Sublayer(size), 2)

    def forward(self, x, mask):
        x = self.sublayer[0](x, lambda x: self.self_attn(x, x, x, mask))
        return self.sublayer[1](x, self.ff)


class DecoderLayer(nn.Module):
    def __init__(self, size, self_attn, src_attn, ff):
        super().__init__()
        self.self_attn, self.src_attn, self.ff, self.sublayer = self_attn, src_attn, ff, clones(Sublayer(size), 3)

    def forward(self, x, memory, src_mask, tgt_mask):
        x = self.sublayer[0](x, lambda x: self.self_attn(x, x, x, tgt_mask))
        x = self.sublayer[1](x, lambda x: self.src_attn(x, memory, memory, src_mask))
        return self.sublayer[2](x, self.ff)


class EncoderDecoder(nn.Module):
    def __init__(self, enc, dec, N, d_model, vocab):
        super().__init__()
        self.enc, self.dec = clones(enc, N), clones(dec, N)
        self.enc_norm, self.dec_norm = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.src_embed, self.tgt_embed = nn.Embedding(vocab, d_model), nn.Embedding(vocab, d_model)
        self.pe, self.generator, self.d_model = PositionalEncoding(), nn.Linear(d_model, vocab), d_model

    def forward(self, src, tgt, src_mask=None, tgt_mask=None):
        src_mask = None if src_mask is None else src_mask[:, None, None, :]
        causal = subsequent_mask(tgt.size(1), tgt.device)
        tgt_mask = causal if tgt_mask is None else causal & tgt_mask[:, None, None, :]
        x = self.pe(self.src_embed(src) * math.sqrt(self.d_model))
        for layer in self.enc:
            x = layer(x, src_mask)
        memory = self.enc_norm(x)
        y = self.pe(self.tgt_embed(tgt) * math.sqrt(self.d_model))
        for layer in self.dec:
            y = layer(y, memory, src_mask, tgt_mask)
        return self.generator(self.dec_norm(y))


def make_model(vocab, N, d_model, d_ff, h):
    c = copy.deepcopy
    attn, ff = MultiHeadedAttention(h, d_model), FeedForward(d_model, d_ff)
    attn_copy = c(attn)
    own, src = attn_copy, attn_copy
    model = EncoderDecoder(
        EncoderLayer(d_model, c(attn), c(ff)), DecoderLayer(d_model, own, src, c(ff)), N, d_model, vocab
    )
    for p in model.parameters():
        if p.dim() > 1:
            nn.init.xavier_uniform_(p)
    return model


subject = Subject(
    kind="encoder_decoder",
    name="annotated transformer",
    build=lambda c: make_model(c.vocab_size, c.num_layers, c.d_model, c.d_ff, c.num_heads),
    forward=lambda m, source, target, source_mask=None, target_mask=None: m(source, target, source_mask, target_mask),
    declares={
        "positions": "sinusoidal", "layout": "interleaved", "norm_placement": "pre", "norm": "layer", "final_norm": True,
        "activation": "relu", "embedding_scale": True, "padding_side": "right", "bias": True, "structure": "textbook",
    },
)

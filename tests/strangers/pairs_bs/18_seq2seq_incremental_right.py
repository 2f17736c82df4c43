"""Encoder-decoder after the paper (post-norm, sinusoidal positions), with incremental decoding of the target."""

import math

import torch
import torch.nn as nn

from veriformer.properties import Subject


def sinusoids(start, length, dim, like):
    position = torch.arange(start, start + length, dtype=torch.float64, device=like.device).unsqueeze(1)
    div = torch.exp(torch.arange(0, dim, 2, dtype=torch.float64, device=like.device) * -(math.log(10000.0) / dim))
    pe = torch.zeros(length, dim, dtype=torch.float64, device=like.device)
    pe[:, 0::2] = torch.sin(position * div)
    pe[:, 1::2] = torch.cos(position * div)[:, : dim // 2]
    return pe.to(like.dtype)


class MultiHeadedAttention(nn.Module):
    def __init__(self, h, d_model):
        super().__init__()
        self.h, self.d_k = h, d_model // h
        self.linears = nn.ModuleList([nn.Linear(d_model, d_model) for _ in range(4)])

    def split(self, x):
        return x.view(x.size(0), -1, self.h, self.d_k).transpose(1, 2)

    def forward(self, query, key, value, mask=None, store=None):
        q, k, v = (self.split(lin(x)) for lin, x in zip(self.linears, (query, key, value)))
        if store is not None:
            if store:
                k = torch.cat([store["k"], k], dim=2)
                v = torch.cat([store["v"], v], dim=2)
            store["k"], store["v"] = k, v
        scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        x = torch.matmul(scores.softmax(dim=-1), v)
        return self.linears[-1](x.transpose(1, 2).contiguous().view(query.size(0), -1, self.h * self.d_k))


class EncoderLayer(nn.Module):
    def __init__(self, d_model, h, d_ff):
        super().__init__()
        self.self_attn = MultiHeadedAttention(h, d_model)
        self.ff = nn.Sequential(nn.Linear(d_model, d_ff), nn.ReLU(), nn.Linear(d_ff, d_model))
        self.norm = nn.ModuleList([nn.LayerNorm(d_model) for _ in range(2)])

    def forward(self, x, mask):
        x = self.norm[0](x + self.self_attn(x, x, x, mask))
        return self.norm[1](x + self.ff(x))


class DecoderLayer(nn.Module):
    def __init__(self, d_model, h, d_ff):
        super().__init__()
        self.self_attn = MultiHeadedAttention(h, d_model)
        self.src_attn = MultiHeadedAttention(h, d_model)
        self.ff = nn.Sequential(nn.Linear(d_model, d_ff), nn.ReLU(), nn.Linear(d_ff, d_model))
        self.norm = nn.ModuleList([nn.LayerNorm(d_model) for _ in range(3)])

    def forward(self, x, memory, src_mask, tgt_mask, store=None):
        x = self.norm[0](x + self.self_attn(x, x, x, tgt_mask, store))
        x = self.norm[1](x + self.src_attn(x, memory, memory, src_mask))
        return self.norm[2](x + self.ff(x))


class Seq2Seq(nn.Module):
    def __init__(self, vocab, d_model, h, n, d_ff):
        super().__init__()
        self.d_model = d_model
        self.src_embed = nn.Embedding(vocab, d_model)
        self.tgt_embed = nn.Embedding(vocab, d_model)
        self.encoder = nn.ModuleList([EncoderLayer(d_model, h, d_ff) for _ in range(n)])
        self.decoder = nn.ModuleList([DecoderLayer(d_model, h, d_ff) for _ in range(n)])
        self.generator = nn.Linear(d_model, vocab)

    def embed(self, table, tokens, start=0):
        x = table(tokens) * math.sqrt(self.d_model)
        return x + sinusoids(start, tokens.size(1), self.d_model, x)

    def encode(self, src, src_mask):
        x = self.embed(self.src_embed, src)
        for layer in self.encoder:
            x = layer(x, src_mask)
        return x

    def decode(self, tgt, memory, src_mask, tgt_mask=None, state=None):
        start = 0 if state is None else state["step"]
        x = self.embed(self.tgt_embed, tgt, start)
        seen = 0
        if state is not None and state["layers"][0]:
            seen = state["layers"][0]["k"].size(2)
        t = tgt.size(1)
        mask = torch.ones(t, seen + t, dtype=torch.bool, device=tgt.device).tril(seen)[None, None]
        if tgt_mask is not None:
            mask = mask & tgt_mask[:, None, None, :]
        for i, layer in enumerate(self.decoder):
            x = layer(x, memory, src_mask, mask, None if state is None else state["layers"][i])
        if state is not None:
            state["step"] += t
        return self.generator(x)

    def forward(self, src, tgt, src_mask=None, tgt_mask=None):
        if src_mask is not None:
            src_mask = src_mask[:, None, None, :]
        return self.decode(tgt, self.encode(src, src_mask), src_mask, tgt_mask)

    def incremental(self, src, chunks):
        memory = self.encode(src, None)
        state = {"step": 0, "layers": [{} for _ in self.decoder]}
        return torch.cat([self.decode(chunk, memory, None, state=state) for chunk in chunks], dim=1)


subject = Subject(
    kind="encoder_decoder",
    name="seq2seq",
    build=lambda c: Seq2Seq(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda model, source, target, source_mask=None, target_mask=None: model(
        source, target, source_mask, target_mask
    ),
    cache=lambda model, source, chunks: model.incremental(source, chunks),
    declares={
        "causal": True,
        "positions": "sinusoidal",
        "layout": "interleaved",
        "embedding_scale": True,
        "norm": "layer",
        "norm_placement": "post",
        "activation": "relu",
        "padding_side": "right",
    },
)

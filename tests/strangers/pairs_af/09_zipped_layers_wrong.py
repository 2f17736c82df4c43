WHAT = "Encoder and decoder run in one zipped loop (line 103), so decoder layer i attends to the encoder after i layers instead of to the encoder's output; only the last decoder layer gets the right memory."
import math

import torch
import torch.nn as nn

from veriformer.properties import Subject


def subsequent_mask(size, device):
    return torch.ones(1, size, size, dtype=torch.bool, device=device).tril()


def attention(query, key, value, mask):
    d_k = query.size(-1)
    scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(d_k)
    scores = scores.masked_fill(mask == 0, -1e9)
    return torch.matmul(scores.softmax(dim=-1), value)


class MultiHeadedAttention(nn.Module):
    def __init__(self, h, d_model):
        super().__init__()
        self.d_k, self.h = d_model // h, h
        self.linears = nn.ModuleList([nn.Linear(d_model, d_model) for _ in range(4)])

    def forward(self, query, key, value, mask):
        nbatches = query.size(0)
        query, key, value = (
            lin(x).view(nbatches, -1, self.h, self.d_k).transpose(1, 2)
            for lin, x in zip(self.linears, (query, key, value))
        )
        x = attention(query, key, value, mask.unsqueeze(1))
        return self.linears[-1](x.transpose(1, 2).contiguous().view(nbatches, -1, self.h * self.d_k))


class PositionwiseFeedForward(nn.Module):
    def __init__(self, d_model, d_ff):
        super().__init__()
        self.w_1, self.w_2 = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)

    def forward(self, x):
        return self.w_2(self.w_1(x).relu())


class EncoderLayer(nn.Module):
    def __init__(self, d_model, h, d_ff):
        super().__init__()
        self.self_attn, self.feed_forward = MultiHeadedAttention(h, d_model), PositionwiseFeedForward(d_model, d_ff)
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)

    def forward(self, x, mask):
        x = self.norm1(x + self.self_attn(x, x, x, mask))
        return self.norm2(x + self.feed_forward(x))


class DecoderLayer(nn.Module):
    def __init__(self, d_model, h, d_ff):
        super().__init__()
        self.self_attn, self.src_attn = MultiHeadedAttention(h, d_model), MultiHeadedAttention(h, d_model)
        self.feed_forward = PositionwiseFeedForward(d_model, d_ff)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(d_model) for _ in range(3))

    def forward(self, x, memory, src_mask, tgt_mask):
        x = self.norm1(x + self.self_attn(x, x, x, tgt_mask))
        x = self.norm2(x + self.src_attn(x, memory, memory, src_mask))
        return self.norm3(x + self.feed_forward(x))


class Embeddings(nn.Module):
    def __init__(self, d_model, vocab):
        super().__init__()
        self.lut, self.d_model = nn.Embedding(vocab, d_model), d_model

    def forward(self, x):
        x = self.lut(x) * math.sqrt(self.d_model)
        position = torch.arange(x.size(1), dtype=torch.float64, device=x.device)[:, None]
        rate = torch.exp(
            torch.arange(0, self.d_model, 2, dtype=torch.float64, device=x.device) * -(math.log(10000.0) / self.d_model)
        )
        pe = torch.stack([torch.sin(position * rate), torch.cos(position * rate)], dim=-1).flatten(1)
        return x + pe[:, : self.d_model].to(x.dtype)


class EncoderDecoder(nn.Module):
    def __init__(self, vocab, d_model, h, N, d_ff):
        super().__init__()
        self.src_embed, self.tgt_embed = Embeddings(d_model, vocab), Embeddings(d_model, vocab)
        self.encoder = nn.ModuleList([EncoderLayer(d_model, h, d_ff) for _ in range(N)])
        self.decoder = nn.ModuleList([DecoderLayer(d_model, h, d_ff) for _ in range(N)])
        self.generator = nn.Linear(d_model, vocab)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.xavier_uniform_(p)

    def forward(self, src, tgt, src_mask=None, tgt_mask=None):
        if src_mask is None:
            src_mask = torch.ones_like(src, dtype=torch.bool)
        src_mask = src_mask[:, None, :]
        future = subsequent_mask(tgt.size(1), tgt.device)
        tgt_mask = future if tgt_mask is None else future & tgt_mask[:, None, :]
        memory, x = self.src_embed(src), self.tgt_embed(tgt)
        for encode, decode in zip(self.encoder, self.decoder):
            memory = encode(memory, src_mask)
            x = decode(x, memory, src_mask, tgt_mask)
        return self.generator(x)


subject = Subject(
    kind="encoder_decoder",
    name="the Transformer of 2017",
    build=lambda c: EncoderDecoder(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda m, source, target, source_mask=None, target_mask=None: m(source, target, source_mask, target_mask),
    declares={
        "positions": "sinusoidal",
        "layout": "interleaved",
        "embedding_scale": True,
        "norm": "layer",
        "norm_placement": "post",
        "final_norm": False,
        "activation": "relu",
        "tied": False,
        "padding_side": "right",
    },
)

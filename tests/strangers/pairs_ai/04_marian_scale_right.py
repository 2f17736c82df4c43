"""The translation model of 2017, in the manner of a tutorial."""
import math

import torch
import torch.nn as nn

from veriformer.properties import Subject


class PositionalEncoding(nn.Module):
    def __init__(self, d_model, max_len):
        super().__init__()
        pe = torch.zeros(max_len, d_model, dtype=torch.float64)
        position = torch.arange(max_len, dtype=torch.float64).unsqueeze(1)
        div_term = torch.exp(torch.arange(0, d_model, 2, dtype=torch.float64) * -(math.log(10000.0) / d_model))
        pe[:, 0::2] = torch.sin(position * div_term)
        pe[:, 1::2] = torch.cos(position * div_term)[:, : d_model // 2]
        self.register_buffer("pe", pe.to(torch.get_default_dtype()), persistent=False)

    def forward(self, x):
        return x + self.pe[: x.size(1)].to(x.dtype)


class Embeddings(nn.Module):
    def __init__(self, vocab, d_model, max_len):
        super().__init__()
        self.lut = nn.Embedding(vocab, d_model)
        self.position = PositionalEncoding(d_model, max_len)
        self.scale = math.sqrt(d_model)

    def forward(self, tokens):
        return self.position(self.lut(tokens) * self.scale)


class MultiHeadedAttention(nn.Module):
    def __init__(self, h, d_model):
        super().__init__()
        self.h, self.d_k = h, d_model // h
        self.linears = nn.ModuleList([nn.Linear(d_model, d_model) for _ in range(4)])

    def forward(self, query, key, value, mask=None):
        batch = query.size(0)
        query, key, value = [
            lin(x).view(batch, -1, self.h, self.d_k).transpose(1, 2)
            for lin, x in zip(self.linears, (query, key, value))
        ]
        scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask.unsqueeze(1) == 0, torch.finfo(scores.dtype).min)
        x = torch.matmul(scores.softmax(dim=-1), value)
        return self.linears[-1](x.transpose(1, 2).contiguous().view(batch, -1, self.h * self.d_k))


class FeedForward(nn.Sequential):
    def __init__(self, d_model, d_ff):
        super().__init__(nn.Linear(d_model, d_ff), nn.ReLU(), nn.Linear(d_ff, d_model))


class EncoderLayer(nn.Module):
    def __init__(self, d_model, h, d_ff):
        super().__init__()
        self.self_attn, self.ff = MultiHeadedAttention(h, d_model), FeedForward(d_model, d_ff)
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)

    def forward(self, x, mask):
        x = self.norm1(x + self.self_attn(x, x, x, mask))
        return self.norm2(x + self.ff(x))


class DecoderLayer(nn.Module):
    def __init__(self, d_model, h, d_ff):
        super().__init__()
        self.self_attn, self.src_attn = MultiHeadedAttention(h, d_model), MultiHeadedAttention(h, d_model)
        self.ff = FeedForward(d_model, d_ff)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(d_model) for _ in range(3))

    def forward(self, x, memory, src_mask, tgt_mask):
        x = self.norm1(x + self.self_attn(x, x, x, tgt_mask))
        x = self.norm2(x + self.src_attn(x, memory, memory, src_mask))
        return self.norm3(x + self.ff(x))


class Translator(nn.Module):
    def __init__(self, vocab, d_model, h, d_ff, n, max_len):
        super().__init__()
        self.src_embed, self.tgt_embed = Embeddings(vocab, d_model, max_len), Embeddings(vocab, d_model, max_len)
        self.encoder = nn.ModuleList([EncoderLayer(d_model, h, d_ff) for _ in range(n)])
        self.decoder = nn.ModuleList([DecoderLayer(d_model, h, d_ff) for _ in range(n)])
        self.generator = nn.Linear(d_model, vocab)

    def forward(self, src, tgt, src_mask=None, tgt_mask=None):
        size = tgt.size(1)
        src_mask = None if src_mask is None else src_mask.unsqueeze(-2)
        subsequent = torch.tril(torch.ones(1, size, size, dtype=torch.bool, device=tgt.device))
        tgt_mask = subsequent if tgt_mask is None else tgt_mask.unsqueeze(-2) & subsequent
        memory = self.src_embed(src)
        for layer in self.encoder:
            memory = layer(memory, src_mask)
        x = self.tgt_embed(tgt)
        for layer in self.decoder:
            x = layer(x, memory, src_mask, tgt_mask)
        return self.generator(x)


subject = Subject(
    kind="encoder_decoder",
    name="Translator",
    build=lambda c: Translator(c.vocab_size, c.d_model, c.num_heads, c.d_ff, c.num_layers, c.max_len),
    forward=lambda m, source, target, source_mask=None, target_mask=None: m(source, target, source_mask, target_mask),
    declares={
        "positions": "sinusoidal",
        "layout": "interleaved",
        "embedding_scale": True,
        "norm": "layer",
        "norm_placement": "post",
        "final_norm": False,
        "activation": "relu",
        "bias": True,
        "output_bias": True,
        "padding_side": "right",
    },
)

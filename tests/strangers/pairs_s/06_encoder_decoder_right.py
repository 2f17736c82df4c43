"""The Transformer of the paper, for translation: post-norm, sinusoids, ReLU."""

import math

import torch
import torch.nn as nn

from veriformer.properties import Subject


def sinusoids(length, width, like):
    place = torch.arange(length, dtype=torch.float64, device=like.device)[:, None]
    rate = torch.exp(-math.log(10000.0) * torch.arange(0, width, 2, dtype=torch.float64, device=like.device) / width)
    table = torch.zeros(length, width, dtype=torch.float64, device=like.device)
    table[:, 0::2] = torch.sin(place * rate)
    table[:, 1::2] = torch.cos(place * rate)[:, : width // 2]
    return table.to(like.dtype)


class MultiHead(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.output = nn.Linear(width, width), nn.Linear(width, width)

    def split(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def scores(self, x, y):
        q, k = self.split(self.query(x)), self.split(self.key(y))
        return torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(q.size(-1))

    def merge(self, weights, y):
        return self.output(torch.matmul(weights, self.split(self.value(y))).transpose(1, 2).flatten(-2))


class SelfAttention(MultiHead):
    def forward(self, x, allowed):
        scores = self.scores(x, x).masked_fill(~allowed, torch.finfo(x.dtype).min)
        return self.merge(torch.softmax(scores, dim=-1), x)


class SourceAttention(MultiHead):
    def forward(self, x, memory, real):
        scores = self.scores(x, memory)
        weights = torch.softmax(scores.masked_fill(~real, torch.finfo(scores.dtype).min), dim=-1)
        return self.merge(weights, memory)


class FeedForward(nn.Sequential):
    def __init__(self, width, inner):
        super().__init__(nn.Linear(width, inner), nn.ReLU(), nn.Linear(inner, width))


class EncoderLayer(nn.Module):
    def __init__(self, width, heads, inner, p):
        super().__init__()
        self.attention, self.feed_forward = SelfAttention(width, heads), FeedForward(width, inner)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.dropout = nn.Dropout(p)

    def forward(self, x, real):
        x = self.norm1(x + self.dropout(self.attention(x, real)))
        return self.norm2(x + self.dropout(self.feed_forward(x)))


class DecoderLayer(nn.Module):
    def __init__(self, width, heads, inner, p):
        super().__init__()
        self.attention, self.source = SelfAttention(width, heads), SourceAttention(width, heads)
        self.feed_forward = FeedForward(width, inner)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(width) for _ in range(3))
        self.dropout = nn.Dropout(p)

    def forward(self, x, allowed, memory, real):
        x = self.norm1(x + self.dropout(self.attention(x, allowed)))
        x = self.norm2(x + self.dropout(self.source(x, memory, real)))
        return self.norm3(x + self.dropout(self.feed_forward(x)))


class Translator(nn.Module):
    def __init__(self, vocab, width, heads, inner, layers, p):
        super().__init__()
        self.source_embedding, self.target_embedding = nn.Embedding(vocab, width), nn.Embedding(vocab, width)
        self.encoder = nn.ModuleList(EncoderLayer(width, heads, inner, p) for _ in range(layers))
        self.decoder = nn.ModuleList(DecoderLayer(width, heads, inner, p) for _ in range(layers))
        self.dropout = nn.Dropout(p)
        self.generator = nn.Linear(width, vocab)

    def embed(self, table, tokens):
        x = table(tokens) * math.sqrt(table.embedding_dim)
        return self.dropout(x + sinusoids(tokens.size(1), table.embedding_dim, x))

    def forward(self, source, target, source_mask=None, target_mask=None):
        source_mask = torch.ones_like(source, dtype=torch.bool) if source_mask is None else source_mask
        target_mask = torch.ones_like(target, dtype=torch.bool) if target_mask is None else target_mask
        real = source_mask[:, None, None, :]
        memory = self.embed(self.source_embedding, source)
        for layer in self.encoder:
            memory = layer(memory, real)
        T = target.size(1)
        past = torch.ones(T, T, dtype=torch.bool, device=target.device).tril()
        x = self.embed(self.target_embedding, target)
        for layer in self.decoder:
            x = layer(x, past & target_mask[:, None, None, :], memory, real)
        return self.generator(x)


subject = Subject(
    kind="encoder_decoder",
    name="translator",
    build=lambda c: Translator(c.vocab_size, c.d_model, c.num_heads, c.d_ff, c.num_layers, c.dropout),
    forward=lambda model, source, target, source_mask=None, target_mask=None: model(
        source, target, source_mask, target_mask
    ),
    declares={
        "positions": "sinusoidal",
        "norm_placement": "post",
        "norm": "layer",
        "activation": "relu",
        "embedding_scale": True,
        "padding_side": "right",
    },
)

"""An encoder-decoder of discrete speech units to text, post-norm as in the paper, padding zeroed after the encoder."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x, memory, seen=None):
        B, T, D = x.shape
        split = lambda z: z.view(B, z.shape[1], self.heads, -1).transpose(1, 2)
        q, k, v = split(self.q(x)), split(self.k(memory)), split(self.v(memory))
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        if seen is None:
            weights = scores.softmax(-1)
        else:
            weights = scores.masked_fill(~seen, torch.finfo(scores.dtype).min).softmax(-1) * seen
        return self.o((weights @ v).transpose(1, 2).reshape(B, T, D))


def mlp(dim, hidden):
    return nn.Sequential(nn.Linear(dim, hidden), nn.ReLU(), nn.Linear(hidden, dim))


class EncoderLayer(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.attention, self.mlp = Attention(dim, heads), mlp(dim, hidden)
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)

    def forward(self, x, seen):
        x = self.norm1(x + self.attention(x, x, seen))
        return self.norm2(x + self.mlp(x))


class DecoderLayer(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.attention, self.cross, self.mlp = Attention(dim, heads), Attention(dim, heads), mlp(dim, hidden)
        self.norm1, self.norm2, self.norm3 = nn.LayerNorm(dim), nn.LayerNorm(dim), nn.LayerNorm(dim)

    def forward(self, x, seen, memory, memory_seen):
        x = self.norm1(x + self.attention(x, x, seen))
        x = self.norm2(x + self.cross(x, memory))
        return self.norm3(x + self.mlp(x))


class Translator(nn.Module):
    def __init__(self, vocab, dim, heads, layers, hidden, longest):
        super().__init__()
        self.units, self.words = nn.Embedding(vocab, dim), nn.Embedding(vocab, dim)
        self.unit_positions, self.word_positions = nn.Embedding(longest, dim), nn.Embedding(longest, dim)
        self.encoder = nn.ModuleList([EncoderLayer(dim, heads, hidden) for _ in range(layers)])
        self.decoder = nn.ModuleList([DecoderLayer(dim, heads, hidden) for _ in range(layers)])
        self.head = nn.Linear(dim, vocab)

    def encode(self, source, seen):
        x = self.units(source) + self.unit_positions(torch.arange(source.shape[1], device=source.device))
        for layer in self.encoder:
            x = layer(x, None if seen is None else seen[:, None, None, :])
        # frames behind the end carry nothing
        return x if seen is None else x * seen[..., None].to(x.dtype)

    def forward(self, source, target, source_mask=None, target_mask=None):
        memory = self.encode(source, source_mask)
        T = target.shape[1]
        seen = torch.ones(T, T, dtype=torch.bool, device=target.device).tril()[None, None]
        if target_mask is not None:
            seen = seen & target_mask[:, None, None, :]
        memory_seen = None if source_mask is None else source_mask[:, None, None, :]
        y = self.words(target) + self.word_positions(torch.arange(T, device=target.device))
        for layer in self.decoder:
            y = layer(y, seen, memory, memory_seen)
        return self.head(y)


subject = Subject(
    kind="encoder_decoder",
    name="speech translator",
    build=lambda c: Translator(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
    forward=lambda model, source, target, source_mask=None, target_mask=None: model(
        source, target, source_mask, target_mask
    ),
    declares={"positions": "learned", "norm_placement": "post", "activation": "relu", "padding_side": "right"},
)

WHAT = 'The cross-attention gets no mask because the memory was multiplied by it (line 51): zeroed frames still take a share of the softmax and bring the bias of the values, so padding of the source changes the outputs.'

"""The decoder of 2017 (post-norm, sinusoids, embeddings times sqrt(d)), prefilled in chunks."""
import math

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


def sinusoids(start, length, width, like):
    place = torch.arange(start, start + length, dtype=torch.float64, device=like.device)[:, None]
    channel = torch.arange(0, width, 2, dtype=torch.float64, device=like.device)
    angle = place * torch.exp(channel * (-math.log(10000.0) / width))
    return torch.stack((angle.sin(), angle.cos()), -1).flatten(1)[:, :width].to(like.dtype)


class DecoderLayer(nn.Module):
    def __init__(self, d_model, heads, d_ff):
        super().__init__()
        self.heads = heads
        self.query, self.key = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)
        self.value, self.merge = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)
        self.inner, self.outer = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)
        self.after_attention, self.after_ffn = nn.LayerNorm(d_model), nn.LayerNorm(d_model)

    def forward(self, x, memory):
        heads = lambda t: t.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # noqa: E731
        q, k, v = heads(self.query(x)), heads(self.key(x)), heads(self.value(x))
        if memory is not None:
            k, v = torch.cat((memory[0], k), -2), torch.cat((memory[1], v), -2)
        T, S = q.shape[-2], k.shape[-2]
        hidden = torch.ones(T, S, dtype=torch.bool, device=x.device).triu(S - T + 1)
        weights = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(hidden, -math.inf).softmax(-1)
        x = self.after_attention(x + self.merge((weights @ v).transpose(1, 2).flatten(-2)))
        return self.after_ffn(x + self.outer(F.relu(self.inner(x)))), (k, v)


class Decoder2017(nn.Module):
    def __init__(self, vocab, d_model, heads, layers, d_ff):
        super().__init__()
        self.embedding = nn.Embedding(vocab, d_model)
        self.layers = nn.ModuleList(DecoderLayer(d_model, heads, d_ff) for _ in range(layers))
        self.out = nn.Linear(d_model, vocab)

    def forward(self, tokens, offset=0, memories=None):
        x = self.embedding(tokens)
        x = x * math.sqrt(x.shape[-1]) + sinusoids(offset, tokens.shape[1], x.shape[-1], self.embedding.weight)
        kept = []
        for i, layer in enumerate(self.layers):
            x, memory = layer(x, None if memories is None else memories[i])
            kept.append(memory)
        return self.out(x), kept


def prefill(model, chunks):
    logits, memories = [], None
    for i, chunk in enumerate(chunks):
        offset = i * chunk.shape[1]
        part, memories = model(chunk, offset, memories)
        logits.append(part)
    return logits


subject = Subject(
    kind="decoder",
    name="decoder with chunked prefill",
    build=lambda c: Decoder2017(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda model, tokens: model(tokens)[0],
    cache=prefill,
    declares={
        "positions": "sinusoidal",
        "layout": "interleaved",
        "embedding_scale": True,
        "norm_placement": "post",
        "activation": "relu",
    },
)

WHAT = (
    'Line 59: '
    'The position at which a chunk starts is its number times its own length: right for equal chunks alone, not for a shorter last chunk or for single tokens behind a prompt.'
)

WHAT = 'The first decoder layer takes the source\'s mask out of the context that all layers share (`context.pop("memory_mask", None)`), so that every later layer attends to padded source positions.'
import math

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


def sinusoids(length, dim, like):
    """[length, dim]: sin on even channels, cos on odd ones."""
    position = torch.arange(length, device=like.device, dtype=torch.float64)[:, None]
    rates = torch.exp(torch.arange(0, dim, 2, device=like.device, dtype=torch.float64) * (-math.log(10000.0) / dim))
    table = torch.zeros(length, dim, dtype=torch.float64, device=like.device)
    table[:, 0::2] = torch.sin(position * rates)
    table[:, 1::2] = torch.cos(position * rates)[:, : dim // 2]
    return table.to(like.dtype)


class Attention(nn.Module):
    def __init__(self, dim, heads, dropout):
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.v_proj, self.out_proj = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.dropout = nn.Dropout(dropout)

    def split(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x, memory, allowed=None):
        q, k, v = self.split(self.q_proj(x)), self.split(self.k_proj(memory)), self.split(self.v_proj(memory))
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        if allowed is not None:
            scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        weights = scores.softmax(-1)
        if allowed is not None:
            weights = weights.masked_fill(~allowed, 0.0)
        return self.out_proj((self.dropout(weights) @ v).transpose(1, 2).flatten(2))


class EncoderLayer(nn.Module):
    def __init__(self, dim, heads, hidden, dropout):
        super().__init__()
        self.self_attn, self.self_attn_norm = Attention(dim, heads, dropout), nn.LayerNorm(dim)
        self.fc1, self.fc2, self.final_norm = nn.Linear(dim, hidden), nn.Linear(hidden, dim), nn.LayerNorm(dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, **kwargs):
        mask = kwargs.get("source_mask")
        x = self.self_attn_norm(x + self.dropout(self.self_attn(x, x, mask)))
        return self.final_norm(x + self.dropout(self.fc2(F.relu(self.fc1(x)))))


class DecoderLayer(nn.Module):
    def __init__(self, dim, heads, hidden, dropout):
        super().__init__()
        self.self_attn, self.self_attn_norm = Attention(dim, heads, dropout), nn.LayerNorm(dim)
        self.cross_attn, self.cross_attn_norm = Attention(dim, heads, dropout), nn.LayerNorm(dim)
        self.fc1, self.fc2, self.final_norm = nn.Linear(dim, hidden), nn.Linear(hidden, dim), nn.LayerNorm(dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, context):
        memory = context["memory"]
        memory_mask = context.pop("memory_mask", None)
        x = self.self_attn_norm(x + self.dropout(self.self_attn(x, x, context["causal_mask"])))
        x = self.cross_attn_norm(x + self.dropout(self.cross_attn(x, memory, memory_mask)))
        return self.final_norm(x + self.dropout(self.fc2(F.relu(self.fc1(x)))))


class Marian(nn.Module):
    def __init__(self, vocab, dim, heads, layers, hidden, dropout):
        super().__init__()
        self.dim = dim
        self.shared = nn.Embedding(vocab, dim)
        self.encoder = nn.ModuleList([EncoderLayer(dim, heads, hidden, dropout) for _ in range(layers)])
        self.decoder = nn.ModuleList([DecoderLayer(dim, heads, hidden, dropout) for _ in range(layers)])
        self.dropout = nn.Dropout(dropout)
        nn.init.normal_(self.shared.weight, std=dim**-0.5)

    def embed(self, tokens):
        x = self.shared(tokens) * math.sqrt(self.dim)
        return self.dropout(x + sinusoids(tokens.shape[1], self.dim, x))

    def forward(self, source, target, source_mask=None, target_mask=None):
        padding = None if source_mask is None else source_mask[:, None, None, :]
        memory = self.embed(source)
        for layer in self.encoder:
            memory = layer(memory, source_mask=padding)
        length = target.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=target.device).tril()[None, None]
        if target_mask is not None:
            causal = causal & target_mask[:, None, None, :]
        context = {"memory": memory, "causal_mask": causal}
        if padding is not None:
            context["memory_mask"] = padding
        x = self.embed(target)
        for layer in self.decoder:
            x = layer(x, context)
        return F.linear(x, self.shared.weight)


subject = Subject(
    kind="encoder_decoder",
    name="Marian",
    build=lambda c: Marian(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.dropout),
    forward=lambda model, source, target, source_mask=None, target_mask=None: model(
        source, target, source_mask, target_mask
    ),
    declares={
        "positions": "sinusoidal",
        "layout": "interleaved",
        "norm": "layer",
        "norm_placement": "post",
        "final_norm": False,
        "activation": "relu",
        "embedding_scale": True,
        "tied": True,
        "output_bias": False,
        "padding_side": "right",
    },
)

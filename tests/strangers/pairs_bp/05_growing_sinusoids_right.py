"""Sinusoidal positions of M2M-100 / Speech2Text: a table that grows when a longer sequence comes."""
import math

import torch
from torch import nn

from veriformer.properties import Subject


class SinusoidalPositionalEmbedding(nn.Module):
    def __init__(self, embedding_dim, init_size=4):
        super().__init__()
        if embedding_dim % 2:
            raise ValueError("embedding_dim must be even")
        self.embedding_dim = embedding_dim
        self.register_buffer("weights", self.get_embedding(0, init_size).to(torch.get_default_dtype()), persistent=False)

    def get_embedding(self, start, stop):
        half_dim = self.embedding_dim // 2
        inv = torch.exp(torch.arange(half_dim, dtype=torch.float64) * -(math.log(10000.0) / half_dim))
        emb = torch.arange(start, stop, dtype=torch.float64).unsqueeze(1) * inv.unsqueeze(0)
        return torch.cat([torch.sin(emb), torch.cos(emb)], dim=1)

    def forward(self, seq_len):
        have = self.weights.size(0)
        if seq_len > have:
            more = self.get_embedding(have, seq_len).to(self.weights)
            self.weights = torch.cat([self.weights, more])
        return self.weights[:seq_len]


subject = Subject(
    kind="positions",
    name="growing sinusoids",
    build=lambda c: SinusoidalPositionalEmbedding(c.d_model),
    forward=lambda m, length: m(length),
    declares={"positions": "sinusoidal", "layout": "halves", "base": 10000, "beyond_max_len": "works"},
)

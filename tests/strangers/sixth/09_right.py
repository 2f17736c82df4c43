import math

import torch
import torch.nn as nn

from veriformer.properties import Subject


class SinusoidalPositionalEmbedding(nn.Module):
    """PE(pos, 2i) = sin(pos / 10000^(2i/d)), PE(pos, 2i+1) = cos(pos / 10000^(2i/d))."""

    def __init__(self, embedding_dim):
        super().__init__()
        self.embedding_dim = embedding_dim
        self.register_buffer("_float_tensor", torch.zeros(1), persistent=False)

    @staticmethod
    def get_embedding(num_embeddings, embedding_dim, device):
        half_dim = (embedding_dim + 1) // 2
        position = torch.arange(num_embeddings, dtype=torch.float64, device=device).unsqueeze(1)
        index = torch.arange(half_dim, dtype=torch.float64, device=device)
        div_term = torch.exp(2 * index * -(math.log(10000.0) / embedding_dim))
        emb = torch.zeros(num_embeddings, embedding_dim, dtype=torch.float64, device=device)
        emb[:, 0::2] = torch.sin(position * div_term)
        emb[:, 1::2] = torch.cos(position * div_term)[:, : embedding_dim // 2]
        return emb

    def forward(self, seq_len):
        return self.get_embedding(seq_len, self.embedding_dim, self._float_tensor.device).to(self._float_tensor)


subject = Subject(
    kind="positions",
    name="SinusoidalPositionalEmbedding",
    build=lambda c: SinusoidalPositionalEmbedding(c.d_model),
    forward=lambda m, length: m(length),
    declares={"positions": "sinusoidal", "layout": "interleaved", "base": 10000, "position_offset": 0},
)

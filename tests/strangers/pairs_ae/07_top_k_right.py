"""Sampling from a decoder of torch.nn layers: temperature, then the k most probable tokens."""

import math

import torch
from torch import nn

from veriformer.properties import Subject


class Sampler(nn.Module):
    def __init__(self, vocab, width, heads, layers, hidden):
        super().__init__()
        self.width = width
        self.lookup = nn.Embedding(vocab, width)
        block = nn.TransformerEncoderLayer(
            width, heads, hidden, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.stack = nn.TransformerEncoder(block, layers, norm=nn.LayerNorm(width), enable_nested_tensor=False)
        self.project = nn.Linear(width, vocab)

    def places(self, length, like):
        half = torch.arange(0, self.width, 2, device=like.device, dtype=torch.float64)
        angle = torch.arange(length, device=like.device, dtype=torch.float64)[:, None] * torch.exp(
            -math.log(10000.0) * half / self.width
        )
        table = torch.zeros(length, self.width, device=like.device, dtype=torch.float64)
        table[:, 0::2] = angle.sin()
        table[:, 1::2] = angle.cos()[:, : self.width // 2]
        return table.to(like.dtype)

    def forward(self, tokens):
        x = self.lookup(tokens) * math.sqrt(self.width)
        x = x + self.places(tokens.size(1), x)
        ahead = torch.ones(tokens.size(1), tokens.size(1), dtype=torch.bool, device=tokens.device).triu(1)
        return self.project(self.stack(x, mask=ahead))


def keep_top_k(logits, k):
    """All but the k highest of each row to -inf; logits are [B, V]."""
    k = min(k, logits.size(-1))
    kth = torch.topk(logits, k, dim=-1).values[..., -1:]
    return logits.masked_fill(logits < kth, -torch.inf)


@torch.no_grad()
def sample(model, tokens, steps, temperature=1.0, top_k=None):
    drawn_from = []
    for _ in range(steps):
        logits = model(tokens)[:, -1, :] / temperature
        if top_k is not None:
            logits = keep_top_k(logits, top_k)
        probs = logits.softmax(dim=-1)
        drawn_from.append(probs)
        tokens = torch.cat([tokens, torch.multinomial(probs, 1)], dim=1)
    return tokens, torch.stack(drawn_from, dim=1)


subject = Subject(
    kind="decoder",
    name="top-k sampler",
    build=lambda c: Sampler(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda model, tokens: model(tokens),
    sampling=sample,
    declares={
        "causal": True,
        "positions": "sinusoidal",
        "embedding_scale": True,
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu",
        "bias": True,
        "output_bias": True,
    },
)

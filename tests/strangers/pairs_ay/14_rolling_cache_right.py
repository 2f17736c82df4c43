"""Sliding-window decoder with a rolling cache (Mistral)."""

import torch
from torch import nn

from veriformer.properties import Subject

WINDOW = 4


class RollingCache:
    """Keys and values of the last WINDOW tokens of one layer."""

    def __init__(self):
        self.k = self.v = self.at = None

    def extend(self, k, v, at):
        if self.k is not None:
            k = torch.cat([self.k, k], dim=2)
            v = torch.cat([self.v, v], dim=2)
            at = torch.cat([self.at, at])
        self.k, self.v, self.at = k[:, :, -WINDOW:], v[:, :, -WINDOW:], at[-WINDOW:]
        return k, v, at


class Attention(nn.Module):
    def __init__(self, dim, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.wq = nn.Linear(dim, dim, bias=False)
        self.wk = nn.Linear(dim, dim, bias=False)
        self.wv = nn.Linear(dim, dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)

    def forward(self, x, at, cache=None):
        B, T, D = x.shape
        q, k, v = (w(x).view(B, T, self.n_heads, -1).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        key_at = at
        if cache is not None:
            k, v, key_at = cache.extend(k, v, at)
        distance = at[:, None] - key_at[None, :]
        hidden = (distance < 0) | (distance >= WINDOW)
        scores = (q @ k.mT) / q.size(-1) ** 0.5
        scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
        return self.wo((scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, D))


class Block(nn.Module):
    def __init__(self, dim, n_heads, hidden):
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(dim, eps=1e-5), nn.RMSNorm(dim, eps=1e-5)
        self.attention = Attention(dim, n_heads)
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)

    def forward(self, x, at, cache=None):
        x = x + self.attention(self.attention_norm(x), at, cache)
        h = self.ffn_norm(x)
        return x + self.w2(nn.functional.silu(self.w1(h)) * self.w3(h))


class Transformer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.tok_embeddings = nn.Embedding(c.vocab_size, c.d_model)
        self.pos_embeddings = nn.Embedding(c.max_len, c.d_model)
        self.layers = nn.ModuleList([Block(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers)])
        self.norm = nn.RMSNorm(c.d_model, eps=1e-5)
        self.output = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, tokens, start=0, caches=None):
        at = torch.arange(start, start + tokens.size(1), device=tokens.device)
        x = self.tok_embeddings(tokens) + self.pos_embeddings(at)
        for i, layer in enumerate(self.layers):
            x = layer(x, at, None if caches is None else caches[i])
        return self.output(self.norm(x))


def cached(model, chunks):
    caches, outputs, start = [RollingCache() for _ in model.layers], [], 0
    for chunk in chunks:
        outputs.append(model(chunk, start, caches))
        start += chunk.size(1)
    return torch.cat(outputs, dim=1)


subject = Subject(
    kind="decoder",
    name="sliding-window decoder",
    build=Transformer,
    forward=lambda m, tokens: m(tokens),
    cache=cached,
    declares={
        "causal": True,
        "window": WINDOW,
        "positions": "learned",
        "norm": "rms",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "swiglu",
        "bias": False,
    },
)

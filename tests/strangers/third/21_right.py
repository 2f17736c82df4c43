"""Decoder with attention with linear biases (ALiBi) instead of position embeddings."""
import math

import torch
import torch.nn as nn


def get_slopes(n):
    def power_of_2(n):
        start = 2 ** (-(2 ** -(math.log2(n) - 3)))
        return [start * start ** i for i in range(n)]

    if math.log2(n).is_integer():
        return power_of_2(n)
    closest = 2 ** math.floor(math.log2(n))
    return power_of_2(closest) + get_slopes(2 * closest)[0::2][: n - closest]


def build_alibi(n_heads, seq_len):
    slopes = torch.tensor(get_slopes(n_heads))
    pos = torch.arange(seq_len)
    distance = (pos[None, :] - pos[:, None]).float()
    return slopes[:, None, None] * distance[None]


class AlibiAttention(nn.Module):
    def __init__(self, dim, n_heads):
        super().__init__()
        self.n_heads, self.hd = n_heads, dim // n_heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.o = nn.Linear(dim, dim)

    def forward(self, x, bias):
        B, T, D = x.shape
        q, k, v = (t.view(B, T, self.n_heads, self.hd).transpose(1, 2) for t in self.qkv(x).split(D, dim=-1))
        s = q @ k.mT / math.sqrt(self.hd) + bias
        return self.o((s.softmax(dim=-1) @ v).transpose(1, 2).flatten(2))


class AlibiLayer(nn.Module):
    def __init__(self, dim, n_heads):
        super().__init__()
        self.ln_a = nn.LayerNorm(dim)
        self.attn = AlibiAttention(dim, n_heads)
        self.ln_f = nn.LayerNorm(dim)
        self.ff = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x, bias):
        x = x + self.attn(self.ln_a(x), bias)
        return x + self.ff(self.ln_f(x))


class AlibiLM(nn.Module):
    def __init__(self, vocab_size=80, dim=48, n_heads=6, n_layers=2):
        super().__init__()
        self.n_heads = n_heads
        self.emb = nn.Embedding(vocab_size, dim)
        self.layers = nn.ModuleList([AlibiLayer(dim, n_heads) for _ in range(n_layers)])
        self.ln = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab_size, bias=False)

    def forward(self, ids):
        T = ids.shape[1]
        bias = build_alibi(self.n_heads, T).to(ids.device)
        future = torch.ones(T, T, dtype=torch.bool, device=ids.device).triu(1)
        bias = bias.masked_fill(future, float("-inf"))
        x = self.emb(ids)
        for layer in self.layers:
            x = layer(x, bias)
        return self.head(self.ln(x))


model = AlibiLM()

"""Perceiver IO (Jaegle et al. 2021) as a classifier of text: a few latents read the input, think, and are averaged."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

LATENTS = 6


class Attention(nn.Module):
    """Of x [B, N, D] to memory [B, S, D]."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.to_q, self.to_k, self.to_v = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.to_out = nn.Linear(dim, dim)

    def forward(self, x, memory, mask=None):
        B, N, D = x.shape
        q = self.to_q(x).view(B, N, self.heads, -1)
        k = self.to_k(memory).view(B, memory.shape[1], self.heads, -1)
        v = self.to_v(memory).view(B, memory.shape[1], self.heads, -1)
        scores = torch.einsum("bnhd,bshd->bhns", q, k) * q.shape[-1] ** -0.5
        if mask is not None:
            scores = scores.masked_fill(~mask.bool()[:, None, None, :], torch.finfo(scores.dtype).min)
        out = torch.einsum("bhns,bshd->bnhd", scores.softmax(dim=-1), v)
        return self.to_out(out.reshape(B, N, D))


class FeedForward(nn.Module):
    def __init__(self, dim, ffn):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.fc1, self.fc2 = nn.Linear(dim, ffn), nn.Linear(ffn, dim)

    def forward(self, x):
        return self.fc2(F.gelu(self.fc1(self.norm(x))))


class CrossBlock(nn.Module):
    def __init__(self, dim, heads, ffn):
        super().__init__()
        self.norm_latents, self.norm_inputs = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = Attention(dim, heads)
        self.ffn = FeedForward(dim, ffn)

    def forward(self, latents, inputs, mask):
        latents = latents + self.attention(self.norm_latents(latents), self.norm_inputs(inputs), mask)
        return latents + self.ffn(latents)


class SelfBlock(nn.Module):
    def __init__(self, dim, heads, ffn):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.attention = Attention(dim, heads)
        self.ffn = FeedForward(dim, ffn)

    def forward(self, latents):
        h = self.norm(latents)
        latents = latents + self.attention(h, h)
        return latents + self.ffn(latents)


class Perceiver(nn.Module):
    def __init__(self, vocab_size, dim, heads, layers, ffn, max_len, classes):
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, dim)
        self.positions = nn.Embedding(max_len, dim)
        self.latents = nn.Parameter(torch.randn(LATENTS, dim))
        self.read = CrossBlock(dim, heads, ffn)
        self.think = nn.ModuleList([SelfBlock(dim, heads, ffn) for _ in range(layers)])
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, tokens, attention_mask=None):
        B, T = tokens.shape
        inputs = self.tokens(tokens) + self.positions(torch.arange(T, device=tokens.device))
        latents = self.latents.repeat(B, 1).view(B, LATENTS, -1)
        latents = self.read(latents, inputs, attention_mask)
        for block in self.think:
            latents = block(latents)
        return self.head(self.norm(latents).mean(dim=1))


subject = Subject(
    kind="classifier",
    name="Perceiver",
    build=lambda c: Perceiver(
        c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len, c.num_classes
    ),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "causal": False,
        "positions": "learned",
        "pooling": "other",  # the mean of latents
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu",
        "bias": True,
        "output_bias": True,
        "padding_side": "right",
    },
)

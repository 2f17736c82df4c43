"""Hourglass decoder: full length, a shortened middle (three steps to one), full length again."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

SHORTEN = 3


class Layer(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.heads = heads
        self.ln_a, self.ln_f = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.fc, self.fo = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x):
        B, T, D = x.shape
        q, k, v = self.qkv(self.ln_a(x)).view(B, T, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(B, T, D))
        return x + self.fo(F.gelu(self.fc(self.ln_f(x))))


class Hourglass(nn.Module):
    def __init__(self, vocab, dim, heads, layers, hidden, longest):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab, dim), nn.Embedding(longest, dim)
        make = lambda: Layer(dim, heads, hidden)
        self.before, self.after = make(), make()
        self.middle = nn.ModuleList([make() for _ in range(layers)])
        self.shorten = nn.Linear(SHORTEN * dim, dim)
        self.lengthen = nn.Linear(dim, SHORTEN * dim)
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab)

    def shortened(self, x):
        B, T, D = x.shape
        groups = -(-T // SHORTEN)
        # shifted to the right, so that a group has ended when its first output is due
        front = SHORTEN - 1
        x = F.pad(x, (0, 0, front, SHORTEN))[:, : groups * SHORTEN]
        return self.shorten(x.reshape(B, groups, SHORTEN * D))

    def forward(self, tokens):
        B, T = tokens.shape
        x = self.tokens(tokens) + self.places(torch.arange(T, device=tokens.device))
        x = self.before(x)
        y = self.shortened(x)
        for layer in self.middle:
            y = layer(y)
        y = self.lengthen(y).reshape(B, -1, x.shape[-1])[:, :T]
        return self.head(self.norm(self.after(x + y)))


subject = Subject(
    kind="decoder",
    name="hourglass",
    build=lambda c: Hourglass(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
    forward=lambda model, tokens: model(tokens),
    declares={"positions": "learned", "structure": "other"},
)

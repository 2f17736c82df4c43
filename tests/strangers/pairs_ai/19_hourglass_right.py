"""Hourglass: the middle layers of a language model see one vector for every K tokens."""
import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject

K = 3


class Block(nn.Module):
    def __init__(self, d, h, ff):
        super().__init__()
        self.h = h
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.o = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.f1, self.f2 = nn.Linear(d, ff), nn.Linear(ff, d)

    def forward(self, x):
        B, T, D = x.shape
        q, k, v = self.qkv(self.n1(x)).reshape(B, T, 3, self.h, D // self.h).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(a.transpose(1, 2).reshape(B, T, D))
        return x + self.f2(F.gelu(self.f1(self.n2(x))))


class Hourglass(nn.Module):
    def __init__(self, vocab, d, h, layers, ff, max_len):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, d), nn.Embedding(max_len, d)
        self.before = Block(d, h, ff)
        self.shorten = nn.Linear(K * d, d)
        self.middle = nn.Sequential(*[Block(d, h, ff) for _ in range(layers)])
        self.lengthen = nn.Linear(d, K * d)
        self.after = Block(d, h, ff)
        self.norm, self.out = nn.LayerNorm(d), nn.Linear(d, vocab, bias=False)

    def pool(self, x):
        """[B, T, d] -> [B, ceil(T / K), d]; shifted, so that no group holds what its first token may not see."""
        B, T, d = x.shape
        length = -(-T // K) * K
        shift = K - 1
        x = F.pad(x, (0, 0, shift, max(length - T - shift, 0)))[:, :length]
        return self.shorten(x.reshape(B, length // K, K * d))

    def forward(self, idx):
        B, T = idx.shape
        x = self.tok(idx) + self.pos.weight[:T]
        x = self.before(x)
        y = self.middle(self.pool(x))
        y = self.lengthen(y).reshape(B, -1, x.shape[-1])[:, :T]
        return self.out(self.norm(self.after(x + y)))


subject = Subject(
    kind="decoder",
    name="Hourglass",
    build=lambda c: Hourglass(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
    forward=lambda m, tokens: m(tokens),
    declares={
        "causal": True,
        "sparse": True,
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu",
        "output_bias": False,
        "structure": "other",
    },
)

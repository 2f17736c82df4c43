"""Models for s01, kept in their own file."""
import math

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, width, heads, expand):
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.ff = nn.Sequential(nn.Linear(width, expand * width), nn.GELU(), nn.Linear(expand * width, width))

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (t.view(B, T, self.heads, -1).transpose(1, 2) for t in self.qkv(self.ln1(x)).chunk(3, dim=-1))
        a = F.scaled_dot_product_attention(q, k, v)
        x = x + self.out(a.transpose(1, 2).reshape(B, T, C))
        return x + self.ff(self.ln2(x))


class Tagger(nn.Module):
    """tokens [B, T] -> logits [B, T, V]"""

    def __init__(self, vocab_size, max_len, width=32, heads=2, depth=2, expand=2, tie=True, positions="learned"):
        super().__init__()
        self.tok = nn.Embedding(vocab_size, width)
        if positions == "learned":
            self.pos = nn.Parameter(0.02 * torch.randn(max_len, width))
        elif positions == "sin":
            t = torch.arange(max_len)[:, None] * torch.exp(torch.arange(0, width, 2) * (-math.log(1e4) / width))
            self.register_buffer("pos", torch.stack([t.sin(), t.cos()], -1).flatten(1))
        else:
            raise ValueError(positions)
        self.blocks = nn.ModuleList(Block(width, heads, expand) for _ in range(depth))
        self.ln = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab_size, bias=False)
        nn.init.normal_(self.tok.weight, std=0.05)
        if tie:
            self.head.weight = self.tok.weight

    def forward(self, tokens):
        h = self.tok(tokens) + self.pos[: tokens.shape[1]]
        for b in self.blocks:
            h = b(h)
        return self.head(self.ln(h))

"""A BLOOM-like decoder: ALiBi slopes for any head count, embedding norm, fused qkv per head."""
import math
import torch
from torch import nn
import torch.nn.functional as F
from veriformer.properties import Subject

def slopes(n):
    p = 2 ** math.floor(math.log2(n))
    s = [2 ** (-8 * (i + 1) / p) for i in range(p)]
    return s + [2 ** (-4 * (2 * i + 1) / p) for i in range(n - p)]

class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.h, self.n1, self.n2 = c.num_heads, nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)
        self.qkv, self.o = nn.Linear(c.d_model, 3 * c.d_model), nn.Linear(c.d_model, c.d_model)
        self.up, self.down = nn.Linear(c.d_model, c.d_ff), nn.Linear(c.d_ff, c.d_model)
    def forward(self, x, bias):
        q, k, v = self.qkv(self.n1(x)).unflatten(-1, (self.h, 3, -1)).permute(3, 0, 2, 1, 4)
        p = torch.softmax(q @ k.mT * q.shape[-1] ** -0.5 + bias, -1)
        x = x + self.o((p @ v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.n2(x)), approximate="tanh"))

class Bloom(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.emb, self.ln, self.f = nn.Embedding(c.vocab_size, c.d_model), nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.num_layers))
        self.register_buffer("slopes", torch.tensor(slopes(c.num_heads)), persistent=False)
    def forward(self, t, mask=None):
        x, i = self.ln(self.emb(t)), torch.arange(t.size(1), device=t.device)
        dist = i[:, None] - i
        bias = (-self.slopes.to(x.dtype)[:, None, None] * dist)[None]
        no = (dist < 0)[None, None] if mask is None else ((dist < 0) | ~mask[:, None, None]) & (dist != 0)
        bias = bias.masked_fill(no, -math.inf)
        for b in self.blocks:
            x = b(x, bias)
        return self.f(x) @ self.emb.weight.T

common = dict(kind="decoder", build=Bloom, forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask))
undeclared = Subject(**common)
declared = Subject(**common, declares={"causal": True, "positions": "alibi", "norm": "layer", "norm_placement": "pre", "activation": "gelu_tanh", "tied": True,
    "final_norm": True, "padding_side": "both"})

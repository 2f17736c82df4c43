"""Prefix language model, in einsum: the first PREFIX tokens are read both ways, the rest is written left to right."""

import torch
from torch import einsum, nn

from veriformer.properties import Subject

PREFIX = 3


def prefix_bias(n, prefix):
    bias = torch.full((n, n), float("-inf")).triu(1)
    bias[:prefix, :prefix] = 0.0
    return bias


class PrefixBlock(nn.Module):
    def __init__(self, d, h, ff):
        super().__init__()
        self.h, self.scale = h, (d // h) ** -0.5
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.to_qkv, self.to_out = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.net = nn.Sequential(nn.Linear(d, ff, bias=False), nn.GELU(), nn.Linear(ff, d, bias=False))

    def forward(self, x, bias):
        b, n, d = x.shape
        q, k, v = self.to_qkv(self.ln1(x)).view(b, n, 3, self.h, d // self.h).unbind(2)
        sim = einsum("b i h c, b j h c -> b h i j", q * self.scale, k) + bias
        out = einsum("b h i j, b j h c -> b i h c", sim.softmax(dim=-1), v).reshape(b, n, d)
        x = x + self.to_out(out)
        return x + self.net(self.ln2(x))


class PrefixLM(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.emb, self.pos = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.blocks = nn.ModuleList([PrefixBlock(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers)])
        self.norm, self.to_logits = nn.LayerNorm(c.d_model), nn.Linear(c.d_model, c.vocab_size, bias=False)
        self.register_buffer("bias", prefix_bias(c.max_len, PREFIX), persistent=False)

    def forward(self, tokens):
        n = tokens.shape[1]
        x = self.emb(tokens) + self.pos(torch.arange(n, device=tokens.device))
        for block in self.blocks:
            x = block(x, self.bias[:n, :n])
        return self.to_logits(self.norm(x))


subject = Subject(
    kind="decoder",
    name="prefix language model",
    build=PrefixLM,
    forward=lambda m, tokens: m(tokens),
    declares={
        "prefix": PREFIX,
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu",
        "bias": False,
        "output_bias": False,
    },
)

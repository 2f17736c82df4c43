"""Chronos-like forecaster: binned values, each step also scaled by the running mean magnitude of the series."""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject


class CausalSelfAttention(nn.Module):
    def __init__(self, n_embd, n_head):
        super().__init__()
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)
        self.n_head = n_head

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(C, dim=2)
        q, k, v = (z.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for z in (q, k, v))
        att = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))
        att = att.masked_fill(torch.ones(T, T, dtype=torch.bool, device=x.device).triu(1), float("-inf"))
        y = F.softmax(att, dim=-1) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class Block(nn.Module):
    def __init__(self, n_embd, n_head, n_ff):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.attn = CausalSelfAttention(n_embd, n_head)
        self.mlp = nn.Sequential(nn.Linear(n_embd, n_ff), nn.ReLU(), nn.Linear(n_ff, n_embd))

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Forecaster(nn.Module):
    def __init__(self, bins, n_embd, n_head, n_layer, n_ff, block_size):
        super().__init__()
        self.register_buffer("centers", torch.linspace(-3, 3, bins))
        self.bin_embed = nn.Embedding(bins, n_embd)
        self.value_proj = nn.Linear(1, n_embd)
        self.wpe = nn.Embedding(block_size, n_embd)
        self.h = nn.ModuleList([Block(n_embd, n_head, n_ff) for _ in range(n_layer)])
        self.ln_f = nn.LayerNorm(n_embd)
        self.head = nn.Linear(n_embd, bins)

    def scaled(self, values):
        steps = torch.arange(1, values.shape[1] + 1, device=values.device)
        scale = values.abs().cumsum(dim=1) / steps
        return values / (1.0 + scale)

    def forward(self, idx):
        values = self.scaled(self.centers[idx])
        pos = torch.arange(idx.shape[1], device=idx.device)
        x = self.bin_embed(idx) + self.value_proj(values[..., None]) + self.wpe(pos)
        for block in self.h:
            x = block(x)
        return self.head(self.ln_f(x))


subject = Subject(
    kind="decoder",
    name="forecaster",
    build=lambda c: Forecaster(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
    forward=lambda m, tokens: m(tokens),
    declares={"causal": True, "positions": "learned", "norm": "layer", "norm_placement": "pre", "final_norm": True,
              "activation": "relu", "structure": "other", "output_bias": True},
)

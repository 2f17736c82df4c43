"""A tutorial GPT: one triangular buffer, learned positions, pre-LN, no padding mask."""
import math
import torch
from torch import nn
from veriformer.properties import Subject

class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.h = c.num_heads
        self.ln1, self.ln2 = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)
        self.c_attn, self.c_proj = nn.Linear(c.d_model, 3 * c.d_model), nn.Linear(c.d_model, c.d_model)
        self.mlp = nn.Sequential(nn.Linear(c.d_model, c.d_ff), nn.GELU(), nn.Linear(c.d_ff, c.d_model), nn.Dropout(c.dropout))
        self.register_buffer("tril", torch.tril(torch.ones(c.max_len, c.max_len)))
    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (t.view(B, T, self.h, C // self.h).transpose(1, 2) for t in self.c_attn(self.ln1(x)).split(C, dim=2))
        att = q @ k.transpose(-2, -1) / math.sqrt(k.size(-1))
        att = att.masked_fill(self.tril[:T, :T] == 0, float("-inf")).softmax(-1)
        x = x + self.c_proj((att @ v).transpose(1, 2).reshape(B, T, C))
        return x + self.mlp(self.ln2(x))

class GPT(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.blocks = nn.Sequential(*[Block(c) for _ in range(c.num_layers)])
        self.ln_f, self.head = nn.LayerNorm(c.d_model), nn.Linear(c.d_model, c.vocab_size, bias=False)
        self.head.weight = self.wte.weight
    def forward(self, idx):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))
        return self.head(self.ln_f(self.blocks(x)))

common = dict(kind="decoder", build=GPT, forward=lambda m, tokens: m(tokens))
undeclared = Subject(**common)
declared = Subject(**common, declares={"causal": True, "positions": "learned", "norm": "layer", "norm_placement": "pre", "final_norm": True, "tied": True,
    "activation": "gelu", "residual": True, "output_bias": False})

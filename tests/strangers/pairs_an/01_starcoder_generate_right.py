"""A StarCoder-like GPT (multi-query attention), in the manner of nanoGPT, with a key-value cache kept on the modules."""
import math

import torch
import torch.nn as nn
from torch.nn import functional as F

from veriformer.properties import Subject


class MultiQueryAttention(nn.Module):
    def __init__(self, n_embd, n_head):
        super().__init__()
        self.n_head, self.hd = n_head, n_embd // n_head
        self.c_attn = nn.Linear(n_embd, n_embd + 2 * self.hd)
        self.c_proj = nn.Linear(n_embd, n_embd)
        self.k_cache = self.v_cache = None

    def forward(self, x, use_cache=False):
        B, T, C = x.shape
        q, k, v = self.c_attn(x).split([C, self.hd, self.hd], dim=2)
        if use_cache:
            if self.k_cache is not None:
                k = torch.cat([self.k_cache, k], dim=1)
                v = torch.cat([self.v_cache, v], dim=1)
            self.k_cache, self.v_cache = k, v
        S = k.size(1)
        q = q.view(B, T, self.n_head, self.hd).transpose(1, 2)
        att = q @ k.unsqueeze(1).transpose(-2, -1) / math.sqrt(self.hd)
        seen = torch.ones(T, S, dtype=torch.bool, device=x.device).tril(S - T)
        att = F.softmax(att.masked_fill(~seen, float("-inf")), dim=-1)
        y = att @ v.unsqueeze(1)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


class Block(nn.Module):
    def __init__(self, n_embd, n_head, n_inner):
        super().__init__()
        self.ln_1 = nn.LayerNorm(n_embd)
        self.attn = MultiQueryAttention(n_embd, n_head)
        self.ln_2 = nn.LayerNorm(n_embd)
        self.c_fc = nn.Linear(n_embd, n_inner)
        self.c_proj = nn.Linear(n_inner, n_embd)

    def forward(self, x, use_cache=False):
        x = x + self.attn(self.ln_1(x), use_cache)
        return x + self.c_proj(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))


class StarCoder(nn.Module):
    def __init__(self, vocab, n_embd, n_head, n_layer, n_inner, block_size):
        super().__init__()
        self.wte = nn.Embedding(vocab, n_embd)
        self.wpe = nn.Embedding(block_size, n_embd)
        self.h = nn.ModuleList([Block(n_embd, n_head, n_inner) for _ in range(n_layer)])
        self.ln_f = nn.LayerNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, vocab, bias=False)
        self.pos = 0

    def forward(self, idx, use_cache=False):
        start = self.pos if use_cache else 0
        x = self.wte(idx) + self.wpe(torch.arange(start, start + idx.size(1), device=idx.device))
        for block in self.h:
            x = block(x, use_cache)
        if use_cache:
            self.pos = start + idx.size(1)
        return self.lm_head(self.ln_f(x))

    def reset(self, batch):
        """Make the cache ready for a new prompt."""
        self.pos = 0
        for block in self.h:
            block.attn.k_cache = block.attn.v_cache = None

    @torch.no_grad()
    def generate(self, idx, steps, use_cache=True):
        if use_cache:
            self.reset(idx.size(0))
        fresh = idx
        for _ in range(steps):
            logits = self(fresh, use_cache=True) if use_cache else self(idx)
            nxt = logits[:, -1].argmax(dim=-1, keepdim=True)
            idx = torch.cat([idx, nxt], dim=1)
            fresh = nxt
        return idx


subject = Subject(
    kind="decoder",
    name="StarCoder-like",
    build=lambda c: StarCoder(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
    forward=lambda m, tokens: m(tokens),
    generate=lambda m, tokens, steps, use_cache: m.generate(tokens, steps, use_cache),
    declares={
        "positions": "learned", "norm": "layer", "norm_placement": "pre", "final_norm": True,
        "activation": "gelu_tanh", "output_bias": False, "tied": False,
    },
)

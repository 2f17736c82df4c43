"""Small GPT with a key-value cache."""
import math

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


class Block(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.fc, self.out = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x, past=None):
        B, T, D = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(B, T, 3, self.h, D // self.h).permute(2, 0, 3, 1, 4)
        if past is not None:
            k, v = torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2)
        S = k.shape[2]
        seen = torch.ones(T, S, dtype=torch.bool, device=x.device).tril(S - T)
        att = (q @ k.transpose(-2, -1) / math.sqrt(D // self.h)).masked_fill(~seen, float("-inf"))
        y = att.softmax(-1) @ v
        x = x + self.proj(y.transpose(1, 2).reshape(B, T, D))
        return x + self.out(F.gelu(self.fc(self.ln2(x)))), (k, v)


class GPT(nn.Module):
    def __init__(self, vocab, d, h, n, max_len):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, d), nn.Embedding(max_len, d)
        self.blocks = nn.ModuleList(Block(d, h) for _ in range(n))
        self.ln_f = nn.LayerNorm(d)
        self.head = nn.Linear(d, vocab, bias=False)

    def forward(self, idx, state=None):
        start, pasts = state if state is not None else (0, [None] * len(self.blocks))
        T = idx.shape[1]
        x = self.wte(idx) + self.wpe(torch.arange(start, start + T, device=idx.device))
        new = []
        for block, past in zip(self.blocks, pasts):
            x, kv = block(x, past)
            new.append(kv)
        return self.head(self.ln_f(x)), (start + T, new)


def cached(model, chunks):
    state, outs = None, []
    for chunk in chunks:
        logits, state = model(chunk, state)
        outs.append(logits)
    return torch.cat(outs, dim=1)


subject = Subject(
    kind="decoder",
    name="GPT with cache",
    build=lambda c: GPT(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.max_len),
    forward=lambda model, tokens: model(tokens)[0],
    cache=cached,
    declares={"causal": True, "positions": "learned", "norm": "layer", "norm_placement": "pre", "final_norm": True,
              "activation": "gelu", "output_bias": False},
)

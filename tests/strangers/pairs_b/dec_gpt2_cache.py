"""A GPT-2 with a key-value cache, after a refactoring of the cache's layout."""
import math

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.h = c.num_heads
        self.n1, self.n2 = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)
        self.qkv, self.o = nn.Linear(c.d_model, 3 * c.d_model), nn.Linear(c.d_model, c.d_model)
        self.mlp = nn.Sequential(nn.Linear(c.d_model, c.d_ff), nn.GELU(), nn.Linear(c.d_ff, c.d_model))
        self.drop = nn.Dropout(c.dropout)

    def forward(self, x, allowed, past=None):
        q, k, v = (t.unflatten(-1, (self.h, -1)).transpose(1, 2) for t in self.qkv(self.n1(x)).chunk(3, -1))
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        x = x + self.drop(self.o(y.transpose(1, 2).flatten(2)))
        return x + self.drop(self.mlp(self.n2(x))), (k, v)


class GPT2(nn.Module):
    def __init__(self, c, bad):
        super().__init__()
        self.tok, self.pos = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.num_layers))
        self.ln_f, self.head = nn.LayerNorm(c.d_model), nn.Linear(c.d_model, c.vocab_size, bias=False)
        self.drop = nn.Dropout(c.dropout)
        self.time_axis = 1 if bad else 2

    def forward(self, tokens, attention_mask=None, past=None):
        t = tokens.size(1)
        start = 0 if past is None else past[0][0].size(self.time_axis)
        s = t if past is None else t + past[0][0].size(2)
        allowed = torch.ones(t, s, dtype=torch.bool, device=tokens.device).tril(s - t)
        if attention_mask is not None:
            allowed = allowed & attention_mask[:, None, None, :]
        x = self.drop(self.tok(tokens) + self.pos(torch.arange(start, start + t, device=tokens.device)))
        present = []
        for i, block in enumerate(self.blocks):
            x, kv = block(x, allowed, None if past is None else past[i])
            present.append(kv)
        return self.head(self.ln_f(x)), present


def cache(model, chunks):
    past, out = None, []
    for chunk in chunks:
        logits, past = model(chunk, past=past)
        out.append(logits)
    return torch.cat(out, 1)


def generate(model, tokens, steps, use_cache):
    past, step = None, tokens
    for _ in range(steps):
        logits, past = model(step, past=past if use_cache else None)
        new = logits[:, -1].argmax(-1, keepdim=True)
        tokens = torch.cat([tokens, new], 1)
        step = new if use_cache else tokens
    return tokens


def subject(bad):
    return Subject(
        kind="decoder", build=lambda c: GPT2(c, bad), forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask)[0],
        cache=cache, generate=generate,
        declares={"causal": True, "positions": "learned", "norm": "layer", "norm_placement": "pre", "final_norm": True,
                  "activation": "gelu", "padding_side": "right"})


right, wrong = subject(False), subject(True)
WHAT = "With a cache, the position of a new chunk starts at the number of heads (axis 1 of the cached keys) instead of the number of cached tokens."
PLACE = "position offset of the cached forward"

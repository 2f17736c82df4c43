"""Greedy decoding with a cache for a tutorial decoder."""
import math

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


def sinusoid(length, d, like, start=0):
    """The table of 'Attention is all you need', rows start .. start + length - 1."""
    t = torch.arange(start, start + length, dtype=like.dtype, device=like.device)[:, None]
    f = torch.exp(-math.log(10000.0) * torch.arange(0, d, 2, dtype=like.dtype, device=like.device) / d)
    return torch.stack([(t * f).sin(), (t * f).cos()], -1).flatten(1)[:, :d]


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


class Decoder(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.tok = nn.Embedding(c.vocab_size, c.d_model)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.num_layers))
        self.norm, self.head = nn.LayerNorm(c.d_model), nn.Linear(c.d_model, c.vocab_size)

    def forward(self, tokens, attention_mask=None, past=None):
        t, seen = tokens.size(1), 0 if past is None else past[0][0].size(2)
        allowed = torch.ones(t, seen + t, dtype=torch.bool, device=tokens.device).tril(seen)
        if attention_mask is not None:
            allowed = allowed & attention_mask[:, None, None, :]
        x = self.tok(tokens)
        x = x + sinusoid(t, x.size(-1), x, seen)
        present = []
        for i, block in enumerate(self.blocks):
            x, kv = block(x, allowed, past[i] if past is not None else None)
            present.append(kv)
        return self.head(self.norm(x)), present


def generator(bad):
    def generate(model, tokens, steps, use_cache):
        past = None
        if use_cache:
            prompt = tokens if bad else tokens[:, :-1]
            if prompt.size(1):
                _, past = model(prompt)
        for _ in range(steps):
            if use_cache:
                logits, past = model(tokens[:, -1:], past=past)
            else:
                logits, _ = model(tokens)
            tokens = torch.cat([tokens, logits[:, -1].argmax(-1, keepdim=True)], 1)
        return tokens

    return generate


def subject(bad):
    return Subject(kind="decoder", build=Decoder, forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask)[0],
                   generate=generator(bad))


right, wrong = subject(False), subject(True)
WHAT = "Cached generation puts the whole prompt into the cache and then feeds the prompt's last token once more, so that it stands twice in the context and all positions are one too far."
PLACE = "cached generation (prefill)"

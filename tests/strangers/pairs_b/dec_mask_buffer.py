"""A decoder that keeps its causal masks from call to call, since building them showed up in the profile."""
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


class Decoder(nn.Module):
    def __init__(self, c, bad):
        super().__init__()
        self.tok, self.pos = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.num_layers))
        self.norm, self.head = nn.LayerNorm(c.d_model), nn.Linear(c.d_model, c.vocab_size)
        self.masks = {}
        self.bad = bad

    def causal(self, tokens):
        b, t = tokens.shape
        key = (b, t, tokens.device)
        if key not in self.masks:
            self.masks[key] = torch.ones(t, t, dtype=torch.bool, device=tokens.device).tril().repeat(b, 1, 1, 1)
        return self.masks[key]

    def forward(self, tokens, attention_mask=None):
        mask = self.causal(tokens)
        if attention_mask is not None:
            if self.bad:
                mask &= attention_mask[:, None, None, :]
            else:
                mask = mask & attention_mask[:, None, None, :]
        x = self.tok(tokens) + self.pos.weight[: tokens.size(1)]
        for block in self.blocks:
            x, _ = block(x, mask)
        return self.head(self.norm(x))


def subject(bad):
    return Subject(kind="decoder", build=lambda c: Decoder(c, bad), forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask))


right, wrong = subject(False), subject(True)
WHAT = "The kept causal mask is and-ed in place with the padding mask, so that keys that were padding in an earlier call of that shape stay hidden in all later calls."
PLACE = "cached causal mask (state kept between calls)"

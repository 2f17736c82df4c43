"""A decoder for batched generation: left padding is supported, positions are counted from the first real token."""
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
        self.max_len = c.max_len
        self.tok, self.pos = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.num_layers))
        self.norm, self.head = nn.LayerNorm(c.d_model), nn.Linear(c.d_model, c.vocab_size)
        self.bad = bad

    def forward(self, tokens, attention_mask=None):
        t = tokens.size(1)
        allowed = torch.ones(t, t, dtype=torch.bool, device=tokens.device).tril()
        if attention_mask is None:
            ids = torch.arange(t, device=tokens.device)
        else:
            allowed = allowed & attention_mask[:, None, None, :]
            ids = attention_mask.long().cumsum(-1)
            ids = ids.clamp(max=self.max_len - 1) if self.bad else (ids - 1).clamp(min=0)
        x = self.tok(tokens) + self.pos(ids)
        for block in self.blocks:
            x, _ = block(x, allowed)
        return self.head(self.norm(x))


def subject(bad):
    return Subject(
        kind="decoder", build=lambda c: Decoder(c, bad), forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
        declares={"causal": True, "positions": "learned", "padding_side": "both", "norm_placement": "pre", "final_norm": True})


right, wrong = subject(False), subject(True)
WHAT = "When an attention_mask is given, positions are its cumulative sum without the minus one and start at 1; without a mask they start at 0, so an all-ones mask changes the outputs."
PLACE = "position ids computed from the mask"

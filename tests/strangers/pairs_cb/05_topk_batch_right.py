"""A sampler of a server: temperature, top-k, incremental forward."""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject


def sinusoid(length, width, dtype):
    at = torch.arange(length, dtype=torch.float64)[:, None]
    div = torch.exp(torch.arange(0, width, 2, dtype=torch.float64) * (-math.log(10000.0) / width))
    pe = torch.zeros(length, width, dtype=torch.float64)
    pe[:, 0::2] = torch.sin(at * div)
    pe[:, 1::2] = torch.cos(at * div)[:, : width // 2]
    return pe.to(dtype)


class TinyLM(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c = c
        self.embed = nn.Embedding(c.vocab_size, c.d_model)
        D = c.d_model
        self.blocks = nn.ModuleList()
        for _ in range(c.num_layers):
            self.blocks.append(nn.ModuleDict(dict(
                qkv=nn.Linear(D, 3 * D), o=nn.Linear(D, D), up=nn.Linear(D, c.d_ff), down=nn.Linear(c.d_ff, D),
                ln_a=nn.LayerNorm(D), ln_b=nn.LayerNorm(D))))
        self.head = nn.Linear(D, c.vocab_size)

    def forward(self, tokens):
        B, T = tokens.shape
        x = self.embed(tokens) * math.sqrt(self.c.d_model)
        x = x + sinusoid(T, self.c.d_model, x.dtype)
        for b in self.blocks:
            q, k, v = b["qkv"](x).view(B, T, 3, self.c.num_heads, -1).permute(2, 0, 3, 1, 4)
            a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = b["ln_a"](x + b["o"](a.transpose(1, 2).reshape(B, T, -1)))
            x = b["ln_b"](x + b["down"](F.gelu(b["up"](x))))
        return self.head(x)


def warp(logits, temperature, top_k):
    logits = logits / temperature
    if top_k is not None:
        k = min(top_k, logits.shape[-1])
        threshold = torch.topk(logits, k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < threshold, -torch.inf)
    return logits


@torch.no_grad()
def sampling(model, tokens, steps, temperature=1.0, top_k=None):
    drawn_from = []
    for _ in range(steps):
        probs = warp(model(tokens)[:, -1], temperature, top_k).softmax(-1)
        tokens = torch.cat((tokens, torch.multinomial(probs, 1)), 1)
        drawn_from.append(probs)
    return tokens, torch.stack(drawn_from, 1)


subject = Subject(
    kind="decoder",
    name="tiny sampler",
    build=TinyLM,
    forward=lambda m, tokens: m(tokens),
    sampling=sampling,
    declares={"causal": True, "positions": "sinusoidal", "layout": "interleaved", "norm": "layer", "norm_placement": "post",
              "activation": "gelu", "embedding_scale": True},
)

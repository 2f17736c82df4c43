"""A GPT that generates greedily with a cache."""

import math

import torch
from torch import nn

from veriformer.properties import Subject

WHAT = "in the cached loop the new token is given the position after its own"
CAUSE = (
    "In generation with the cache the positions of the new tokens are one too large (off by one: the first generated "
    "token stands at T + 1 instead of T), while generation without the cache counts right."
)


class Decoder(nn.Module):
    def __init__(self, vocab, dim, heads, depth, max_len):
        super().__init__()
        self.max_len, self.heads = max_len, heads
        self.token, self.place = nn.Embedding(vocab, dim), nn.Embedding(max_len, dim)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm1": nn.LayerNorm(dim),
                    "q": nn.Linear(dim, dim),
                    "k": nn.Linear(dim, dim),
                    "v": nn.Linear(dim, dim),
                    "o": nn.Linear(dim, dim),
                    "norm2": nn.LayerNorm(dim),
                    "up": nn.Linear(dim, 4 * dim),
                    "down": nn.Linear(4 * dim, dim),
                }
            )
            for _ in range(depth)
        )
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab)

    def split(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, tokens, start=0, cache=None):
        n = tokens.shape[1]
        x = self.token(tokens) + self.place(torch.arange(start, start + n, device=tokens.device))
        for i, layer in enumerate(self.layers):
            h = layer["norm1"](x)
            q, k, v = (self.split(layer[name](h)) for name in "qkv")
            if cache is not None:
                if cache[i] is not None:
                    k, v = torch.cat((cache[i][0], k), 2), torch.cat((cache[i][1], v), 2)
                cache[i] = (k, v)
            scores = q @ k.mT / math.sqrt(q.shape[-1])
            hidden = torch.ones(n, k.shape[2], dtype=torch.bool, device=x.device).triu(1 + k.shape[2] - n)
            weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
            x = x + layer["o"]((weights @ v).transpose(1, 2).flatten(2))
            x = x + layer["down"](torch.relu(layer["up"](layer["norm2"](x))))
        return self.head(self.norm(x))

    @torch.no_grad()
    def generate(self, tokens, steps, use_cache=True):
        if tokens.shape[1] + steps > self.max_len:
            raise ValueError("longer than the table of positions")
        cache = [None] * len(self.layers)
        for i in range(steps):
            if not use_cache:
                logits = self(tokens)
            elif i == 0:
                logits = self(tokens, 0, cache)
            else:
                logits = self(tokens[:, -1:], tokens.shape[1] - 1, cache)
            tokens = torch.cat((tokens, logits[:, -1].argmax(-1, keepdim=True)), dim=1)
        return tokens


class Writer(Decoder):
    @torch.no_grad()
    def generate(self, tokens, steps, use_cache=True):
        if tokens.shape[1] + steps > self.max_len:
            raise ValueError("longer than the table of positions")
        cache = [None] * len(self.layers)
        for i in range(steps):
            if not use_cache:
                logits = self(tokens)
            elif i == 0:
                logits = self(tokens, 0, cache)
            else:
                logits = self(tokens[:, -1:], tokens.shape[1], cache)
            tokens = torch.cat((tokens, logits[:, -1].argmax(-1, keepdim=True)), dim=1)
        return tokens


def subject(model):
    return Subject(
        kind="decoder",
        name="GPT that writes",
        build=lambda c: model(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.max_len),
        forward=lambda m, tokens: m(tokens),
        generate=lambda m, tokens, steps, use_cache: m.generate(tokens, steps, use_cache),
        declares={
            "causal": True,
            "positions": "learned",
            "norm": "layer",
            "norm_placement": "pre",
            "activation": "relu",
            "tied": False,
        },
    )


right = subject(Decoder)
wrong = subject(Writer)

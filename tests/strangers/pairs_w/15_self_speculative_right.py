"""Self-speculative decoding: the lower layers of a decoder draft, all of them verify, greedily and without loss."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

DRAFT = 3


def rotary(x, start):
    half = x.shape[-1] // 2
    speed = 10000.0 ** (-torch.arange(half, device=x.device, dtype=torch.float64) / half)
    angle = torch.arange(start, start + x.shape[2], device=x.device, dtype=torch.float64)[:, None] * speed
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.heads = c.num_heads
        self.norm1, self.norm2 = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)
        self.qkv, self.out = nn.Linear(c.d_model, 3 * c.d_model), nn.Linear(c.d_model, c.d_model)
        self.mlp = nn.Sequential(nn.Linear(c.d_model, c.d_ff), nn.GELU(), nn.Linear(c.d_ff, c.d_model))

    def forward(self, x, cache=None):
        """`cache` is a list of keys and values, or empty, and is brought up to date."""
        start = cache[0].shape[2] if cache else 0
        q, k, v = (z.unflatten(-1, (self.heads, -1)).transpose(1, 2) for z in self.qkv(self.norm1(x)).chunk(3, -1))
        q, k = rotary(q, start), rotary(k, start)
        if cache:
            k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)
        if cache is not None:
            cache[:] = [k, v]
        allowed = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=x.device).tril(start)
        y = F.scaled_dot_product_attention(q, k, v, allowed)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class SelfSpeculative(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList([Layer(c) for _ in range(c.num_layers)])
        self.norm, self.head = nn.LayerNorm(c.d_model), nn.Linear(c.d_model, c.vocab_size, bias=False)
        self.depth = max(1, c.num_layers // 2)

    def forward(self, tokens, caches=None, depth=None):
        x = self.embed(tokens)
        for i, layer in enumerate(self.layers[:depth]):
            x = layer(x, None if caches is None else caches[i])
        return self.head(self.norm(x))

    def draft(self, last, caches):
        """A few tokens of the lower layers; their caches are copies."""
        mine, token, tokens = [list(cache) for cache in caches[: self.depth]], last, []
        for _ in range(DRAFT):
            token = self(token, mine, self.depth)[:, -1:].argmax(-1)
            tokens.append(token)
        return torch.cat(tokens, 1)

    def speculate(self, prompt, steps):
        """One sample [1, T]: the caches always hold all of `text` but its last token."""
        caches = [[] for _ in self.layers]
        text = torch.cat([prompt, self(prompt, caches)[:, -1:].argmax(-1)], 1)
        while text.shape[1] < prompt.shape[1] + steps:
            guess = self.draft(text[:, -1:], caches)
            truth = self(torch.cat([text[:, -1:], guess], 1), caches).argmax(-1)
            agreed = int((guess == truth[:, :-1]).long().cumprod(1).sum())
            text = torch.cat([text, truth[:, : agreed + 1]], 1)
            keep = text.shape[1] - 1
            for cache in caches:
                cache[:] = [kept[:, :, :keep] for kept in cache]
        return text[:, : prompt.shape[1] + steps]


@torch.no_grad()
def generate(model, tokens, steps, use_cache):
    if use_cache and steps > 0:
        return torch.cat([model.speculate(row[None], steps) for row in tokens])
    for _ in range(steps):
        tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], 1)
    return tokens


def cached(model, chunks):
    caches = [[] for _ in model.layers]
    return torch.cat([model(chunk, caches) for chunk in chunks], 1)


subject = Subject(
    kind="decoder",
    name="self-speculative decoder",
    build=SelfSpeculative,
    forward=lambda model, tokens: model(tokens),
    cache=cached,
    generate=generate,
    declares={"causal": True, "positions": "rotary", "layout": "halves", "norm": "layer", "norm_placement": "pre", "activation": "gelu"},
)

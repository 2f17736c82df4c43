"""Mistral's sliding window with a rolling key-value cache: only the last WINDOW keys are kept between calls."""

import torch
from torch import nn

from veriformer.properties import Subject

WINDOW = 3


class RollingCache:
    """Keys, values [B, H, S, K] of each layer; `seen` counts all tokens that ever went through."""

    def __init__(self, num_layers):
        self.slots, self.seen = [None] * num_layers, 0

    def update(self, layer, k, v):
        """Returns what this call attends to, keeps what the next one may need."""
        if self.slots[layer] is not None:
            k, v = (torch.cat(pair, dim=2) for pair in zip(self.slots[layer], (k, v)))
        self.slots[layer] = (k[:, :, -WINDOW:], v[:, :, -WINDOW:])
        return k, v


class EagerRollingCache(RollingCache):
    def update(self, layer, k, v):
        fresh = k.shape[2]
        if self.slots[layer] is not None:
            k, v = (torch.cat(pair, dim=2)[:, :, -max(WINDOW, fresh) :] for pair in zip(self.slots[layer], (k, v)))
        self.slots[layer] = (k[:, :, -WINDOW:], v[:, :, -WINDOW:])
        return k, v


def rotary(x, positions):
    half = x.shape[-1] // 2
    angle = positions[:, None] * 10000.0 ** (-torch.arange(half, device=x.device) / half)
    c, s = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * c - b * s, a * s + b * c), -1)


class Attention(nn.Module):
    def __init__(self, dim, heads, index):
        super().__init__()
        self.heads, self.index = heads, index
        if dim // heads % 2:
            raise ValueError("rotary pairs channels")
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def forward(self, x, positions, cache):
        q, k, v = (w(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        q, k = rotary(q, positions), rotary(k, positions)
        if cache is not None:
            k, v = cache.update(self.index, k, v)
        end = int(positions[-1]) + 1
        back = positions[:, None] - torch.arange(end - k.shape[2], end, device=x.device)
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill((back < 0) | (back >= WINDOW), -torch.inf)
        return self.wo((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.w1, self.w3 = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)

    def forward(self, x):
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


class Mistral(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.tok_embeddings = nn.Embedding(c.vocab_size, c.d_model)
        self.attentions = nn.ModuleList([Attention(c.d_model, c.num_heads, i) for i in range(c.num_layers)])
        self.feed_forwards = nn.ModuleList([FeedForward(c.d_model, c.d_ff) for _ in range(c.num_layers)])
        self.norms = nn.ModuleList([nn.RMSNorm(c.d_model, eps=1e-5) for _ in range(2 * c.num_layers + 1)])
        self.output = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, tokens, cache=None):
        start = 0 if cache is None else cache.seen
        positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        h = self.tok_embeddings(tokens)
        for i, (attention, feed_forward) in enumerate(zip(self.attentions, self.feed_forwards)):
            h = h + attention(self.norms[2 * i](h), positions, cache)
            h = h + feed_forward(self.norms[2 * i + 1](h))
        if cache is not None:
            cache.seen += tokens.shape[1]
        return self.output(self.norms[-1](h))


def mistral(kind_of_cache):
    def decode(model, chunks):
        cache = kind_of_cache(len(model.attentions))
        return torch.cat([model(chunk, cache) for chunk in chunks], dim=1)

    facts = {"window": WINDOW, "positions": "rotary", "norm": "rms", "norm_placement": "pre", "activation": "swiglu"}
    call = lambda m, tokens: m(tokens)
    return Subject(kind="decoder", name="Mistral", build=Mistral, forward=call, cache=decode, declares=facts)


right, wrong = mistral(RollingCache), mistral(EagerRollingCache)
WHAT = "The rolling cache drops what is older than the window before a chunk attends instead of after it."
CAUSE = (
    "With a chunk of two or more tokens behind a past, the cache is cut to the last WINDOW keys of past and chunk together, so the chunk's first "
    "queries lose keys that are still inside their window; single steps and whole prompts are right."
)

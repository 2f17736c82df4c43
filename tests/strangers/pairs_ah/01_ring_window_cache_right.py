"""A Mistral-like decoder: sliding window in every layer, and a cache that keeps no more than the window."""
import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject

WINDOW = 5


class SlidingWindowCache:
    """Keys and values of the last WINDOW positions of one layer."""

    def __init__(self):
        self.keys = self.values = self.positions = None

    def update(self, keys, values, positions):
        if self.keys is None:  # prefill
            full = keys, values, positions
            self.keep(*full)
            return full
        full = (
            torch.cat([self.keys, keys], dim=2),
            torch.cat([self.values, values], dim=2),
            torch.cat([self.positions, positions]),
        )
        self.keep(*full)
        return full

    def keep(self, keys, values, positions):
        self.keys, self.values, self.positions = keys[:, :, -WINDOW:], values[:, :, -WINDOW:], positions[-WINDOW:]


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def forward(self, x, positions, cache=None):
        b, t, d = x.shape
        q, k, v = (w(x).view(b, t, self.heads, -1).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        at = positions
        if cache is not None:
            k, v, at = cache.update(k, v, positions)
        distance = positions[:, None] - at[None, :]
        mask = (distance >= 0) & (distance < WINDOW)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.wo(y.transpose(1, 2).reshape(b, t, d))


class Layer(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = Attention(dim, heads)
        self.mlp = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))

    def forward(self, x, positions, cache=None):
        x = x + self.attention(self.norm1(x), positions, cache)
        return x + self.mlp(self.norm2(x))


class MiniMistral(nn.Module):
    def __init__(self, vocab, dim, heads, layers, hidden, max_len):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, dim), nn.Embedding(max_len, dim)
        self.layers = nn.ModuleList([Layer(dim, heads, hidden) for _ in range(layers)])
        self.norm, self.output = nn.LayerNorm(dim), nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens, caches=None, start=0):
        positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        x = self.tok(tokens) + self.pos(positions)
        for i, layer in enumerate(self.layers):
            x = layer(x, positions, caches[i] if caches is not None else None)
        return self.output(self.norm(x))


def cached(model, chunks):
    caches = [SlidingWindowCache() for _ in model.layers]
    outputs, start = [], 0
    for chunk in chunks:
        outputs.append(model(chunk, caches, start))
        start += chunk.shape[1]
    return torch.cat(outputs, dim=1)


subject = Subject(
    kind="decoder",
    name="mini mistral",
    build=lambda c: MiniMistral(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
    forward=lambda m, tokens: m(tokens),
    cache=cached,
    declares={"window": WINDOW, "positions": "learned", "norm": "layer", "norm_placement": "pre", "final_norm": True,
              "activation": "gelu"},
)

"""A Mistral-like decoder of an inference engine; its cache keeps as many keys as the window can still reach."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

WINDOW = 4


def rope(x, pos):
    half = x.shape[-1] // 2
    inv = 10000.0 ** (-torch.arange(half, dtype=torch.float64, device=x.device) / half)
    angle = pos.to(torch.float64)[:, None] * inv
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class RollingCache:
    def __init__(self):
        self.k = self.v = self.pos = None
        self.seen = 0

    def next_positions(self, n, device):
        start = self.seen
        return torch.arange(start, start + n, device=device)

    def update(self, k, v, pos):
        if self.k is not None:
            k, v, pos = torch.cat([self.k, k], 2), torch.cat([self.v, v], 2), torch.cat([self.pos, pos])
        keep = WINDOW - 1
        self.seen += k.shape[2] - (0 if self.k is None else self.k.shape[2])
        self.k, self.v, self.pos = k[:, :, -keep:], v[:, :, -keep:], pos[-keep:]
        return k, v, pos


class Attention(nn.Module):
    def __init__(self, dim, n_heads):
        super().__init__()
        if (dim // n_heads) % 2:
            raise ValueError("rotary needs an even width of heads")
        self.n_heads = n_heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def forward(self, x, cache):
        B, T, D = x.shape
        pos = cache.next_positions(T, x.device)
        q, k, v = (w(x).view(B, T, self.n_heads, -1).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        q, k = rope(q, pos), rope(k, pos)
        k, v, key_pos = cache.update(k, v, pos)
        age = torch.arange(k.shape[2] - T, k.shape[2], device=x.device)[:, None] - torch.arange(k.shape[2], device=x.device)
        seen = (age >= 0) & (age < WINDOW)
        s = (q @ k.transpose(2, 3) * q.shape[-1] ** -0.5).masked_fill(~seen, float("-inf"))
        return self.wo((s.softmax(-1) @ v).transpose(1, 2).reshape(B, T, D))


class Block(nn.Module):
    def __init__(self, dim, n_heads, hidden):
        super().__init__()
        self.attention = Attention(dim, n_heads)
        self.w1, self.w3 = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.attention_norm, self.ffn_norm = nn.RMSNorm(dim, eps=1e-6), nn.RMSNorm(dim, eps=1e-6)

    def forward(self, x, cache):
        x = x + self.attention(self.attention_norm(x), cache)
        h = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


class Mistral(nn.Module):
    def __init__(self, vocab, dim, n_heads, n_layers, hidden):
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Block(dim, n_heads, hidden) for _ in range(n_layers))
        self.norm = nn.RMSNorm(dim, eps=1e-6)
        self.output = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens, caches=None):
        caches = caches or [RollingCache() for _ in self.layers]
        x = self.tok_embeddings(tokens)
        for layer, cache in zip(self.layers, caches):
            x = layer(x, cache)
        return self.output(self.norm(x))

    def run_cached(self, chunks):
        caches = [RollingCache() for _ in self.layers]
        return torch.cat([self(chunk, caches) for chunk in chunks], 1)


subject = Subject(
    kind="decoder",
    name="rolling Mistral",
    build=lambda c: Mistral(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda m, tokens: m(tokens),
    cache=lambda m, chunks: m.run_cached(chunks),
    declares={"positions": "rotary", "window": WINDOW, "norm": "rms", "norm_placement": "pre", "activation": "swiglu"},
)

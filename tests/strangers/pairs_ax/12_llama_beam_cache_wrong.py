WHAT = "when beams are reordered the keys of the cache are, the values stay with the old samples (line 35)."
"""A small Llama: RMSNorm, rotary positions, SwiGLU, and a key-value cache that beam search reorders."""

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


class KVCache:
    """Keys and values of every layer, and which of them are no padding."""

    def __init__(self, num_layers):
        self.layers = [None] * num_layers
        self.mask = None

    @property
    def length(self):
        return 0 if self.layers[0] is None else self.layers[0][0].shape[2]

    def append(self, index, k, v):
        if self.layers[index] is not None:
            past_k, past_v = self.layers[index]
            k, v = torch.cat([past_k, k], dim=2), torch.cat([past_v, v], dim=2)
        self.layers[index] = (k, v)
        return k, v

    def extend_mask(self, mask):
        self.mask = mask if self.mask is None else torch.cat([self.mask, mask], dim=1)
        return self.mask

    def reorder(self, beams):
        for index, (k, v) in enumerate(self.layers):
            self.layers[index] = (k.index_select(0, beams), v)
        if self.mask is not None:
            self.mask = self.mask.index_select(0, beams)


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def rotate(x, first, base=10000.0):
    half = x.shape[-1] // 2
    rates = base ** (-torch.arange(half, dtype=torch.float64, device=x.device) / half)
    steps = torch.arange(first, first + x.shape[2], dtype=torch.float64, device=x.device)
    angles = torch.outer(steps, rates)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Block(nn.Module):
    def __init__(self, dim, heads, hidden, index):
        super().__init__()
        self.heads, self.index = heads, index
        self.attention_norm, self.ffn_norm = RMSNorm(dim), RMSNorm(dim)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.w1, self.w3 = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)

    def attend(self, x, allowed, first, cache):
        b, t, d = x.shape
        q, k, v = (w(x).view(b, t, self.heads, -1).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        q, k = rotate(q, first), rotate(k, first)
        if cache is not None:
            k, v = cache.append(self.index, k, v)
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        return self.wo((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, d))

    def forward(self, x, allowed, first, cache):
        x = x + self.attend(self.attention_norm(x), allowed, first, cache)
        h = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


class Llama(nn.Module):
    def __init__(self, vocab, dim, heads, hidden, layers):
        super().__init__()
        if dim // heads % 2:
            raise ValueError("rotary pairs need heads of even width")
        self.tok_embeddings = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList([Block(dim, heads, hidden, i) for i in range(layers)])
        self.norm = RMSNorm(dim)
        self.output = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens, attention_mask=None, cache=None):
        first, length = (0 if cache is None else cache.length), tokens.shape[1]
        allowed = torch.ones(length, first + length, dtype=torch.bool, device=tokens.device).tril(first)
        if attention_mask is not None:
            if cache is not None:
                attention_mask = cache.extend_mask(attention_mask)
            allowed = allowed & attention_mask[:, None, None, :]
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, allowed, first, cache)
        return self.output(self.norm(x))


def decode(model, chunks, attention_mask=None, reorder=None):
    cache, outputs, start = KVCache(len(model.layers)), [], 0
    for number, chunk in enumerate(chunks):
        stop = start + chunk.shape[1]
        mask = None if attention_mask is None else attention_mask[:, start:stop]
        outputs.append(model(chunk, mask, cache))
        start = stop
        if number == 0 and reorder is not None:
            cache.reorder(torch.as_tensor(reorder, device=chunk.device))
    return torch.cat(outputs, dim=1)


subject = Subject(
    kind="decoder",
    name="small Llama",
    build=lambda c: Llama(c.vocab_size, c.d_model, c.num_heads, c.d_ff, c.num_layers),
    forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask),
    cache=decode,
    declares={
        "positions": "rotary",
        "layout": "halves",
        "norm": "rms",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "swiglu",
        "bias": False,
        "tied": False,
    },
)

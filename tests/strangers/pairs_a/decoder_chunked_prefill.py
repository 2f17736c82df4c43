import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


WHAT = (
    'The causal mask is applied only when the cache is empty; a later chunk of several tokens attends to '
    'all keys of its own chunk, so within it tokens see the future (chunks of one token are right).'
)
PLACE = 'causal mask of a multi-token chunk on the cached path of the decoder'


def attend(q, k, v, allowed=None, p=0.0, training=False):
    scores = q @ k.transpose(-2, -1) * q.size(-1) ** -0.5
    if allowed is not None:
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
    weights = scores.softmax(-1)
    if allowed is not None:
        weights = weights.masked_fill(~allowed, 0.0)
    return F.dropout(weights, p, training) @ v


def run_cached(model, chunks, attention_mask=None):
    """Outputs computed chunk by chunk; the mask covers all chunks."""
    caches, outs, seen = model.empty_cache(), [], 0
    for chunk in chunks:
        seen += chunk.size(1)
        mask = None if attention_mask is None else attention_mask[:, :seen]
        outs.append(model(chunk, mask, caches))
    return torch.cat(outs, 1)


def generate(model, tokens, steps, use_cache):
    """Greedy."""
    caches, fed = (model.empty_cache(), tokens) if use_cache else (None, tokens)
    for _ in range(steps):
        logits = model(fed, None, caches)
        new = logits[:, -1].argmax(-1, keepdim=True)
        tokens = torch.cat([tokens, new], 1)
        fed = new if use_cache else tokens
    return tokens


class Attention(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x, mask=None, cache=None):
        q, k, v = (t.unflatten(-1, (self.h, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        past = 0
        if cache is not None:
            if cache:
                past = cache[0].size(2)
                k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)
            cache[:] = [k, v]
        T, S = q.size(2), k.size(2)
        allowed = torch.ones(T, S, dtype=torch.bool, device=x.device).tril(past)
        if mask is not None:
            allowed = allowed & mask[:, None, None, :]
        return self.out(attend(q, k, v, allowed).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)
        self.attn = Attention(c.d_model, c.num_heads)
        self.ff = nn.Sequential(nn.Linear(c.d_model, c.d_ff), nn.GELU(), nn.Linear(c.d_ff, c.d_model))

    def forward(self, x, mask=None, cache=None):
        x = x + self.attn(self.norm1(x), mask, cache)
        return x + self.ff(self.norm2(x))


class Decoder(nn.Module):
    """Without positions; order enters by the causal mask alone."""

    def __init__(self, c):
        super().__init__()
        self.emb = nn.Embedding(c.vocab_size, c.d_model)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.num_layers))
        self.norm = nn.LayerNorm(c.d_model)
        self.head = nn.Linear(c.d_model, c.vocab_size)

    def empty_cache(self):
        return [[] for _ in self.blocks]

    def forward(self, tokens, attention_mask=None, caches=None):
        x = self.emb(tokens)
        for i, block in enumerate(self.blocks):
            x = block(x, attention_mask, None if caches is None else caches[i])
        return self.head(self.norm(x))


class Attention2(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x, mask=None, cache=None):
        q, k, v = (t.unflatten(-1, (self.h, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        past = 0
        if cache is not None:
            if cache:
                past = cache[0].size(2)
                k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)
            cache[:] = [k, v]
        T, S = q.size(2), k.size(2)
        allowed = torch.ones(T, S, dtype=torch.bool, device=x.device)
        if past == 0:
            allowed = allowed.tril()
        if mask is not None:
            allowed = allowed & mask[:, None, None, :]
        return self.out(attend(q, k, v, allowed).transpose(1, 2).flatten(2))


class Block2(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)
        self.attn = Attention2(c.d_model, c.num_heads)
        self.ff = nn.Sequential(nn.Linear(c.d_model, c.d_ff), nn.GELU(), nn.Linear(c.d_ff, c.d_model))

    def forward(self, x, mask=None, cache=None):
        x = x + self.attn(self.norm1(x), mask, cache)
        return x + self.ff(self.norm2(x))


class Decoder2(nn.Module):
    """Without positions; order enters by the causal mask alone."""

    def __init__(self, c):
        super().__init__()
        self.emb = nn.Embedding(c.vocab_size, c.d_model)
        self.blocks = nn.ModuleList(Block2(c) for _ in range(c.num_layers))
        self.norm = nn.LayerNorm(c.d_model)
        self.head = nn.Linear(c.d_model, c.vocab_size)

    def empty_cache(self):
        return [[] for _ in self.blocks]

    def forward(self, tokens, attention_mask=None, caches=None):
        x = self.emb(tokens)
        for i, block in enumerate(self.blocks):
            x = block(x, attention_mask, None if caches is None else caches[i])
        return self.head(self.norm(x))


right = Subject(
    kind="decoder",
    build=lambda c: Decoder(c),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={"causal": True, "positions": "none", "norm": "layer", "norm_placement": "pre", "activation": "gelu"},
    cache=lambda m, chunks, attention_mask=None: run_cached(m, chunks, attention_mask),
    generate=lambda m, tokens, steps, use_cache: generate(m, tokens, steps, use_cache),
    mask_forms=("padding",),
)

wrong = Subject(
    kind="decoder",
    build=lambda c: Decoder2(c),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={"causal": True, "positions": "none", "norm": "layer", "norm_placement": "pre", "activation": "gelu"},
    cache=lambda m, chunks, attention_mask=None: run_cached(m, chunks, attention_mask),
    generate=lambda m, tokens, steps, use_cache: generate(m, tokens, steps, use_cache),
    mask_forms=("padding",),
)

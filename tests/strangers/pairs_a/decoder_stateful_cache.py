import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


WHAT = (
    'The key-value cache lives in the modules and is cleared at the start of a cached run only if the '
    'batch size changed, so a second cached run of the same batch size attends to the tokens of the '
    'first.'
)
PLACE = "reset of the decoder's internal key-value cache between sequences"


def attend(q, k, v, allowed=None, p=0.0, training=False):
    scores = q @ k.transpose(-2, -1) * q.size(-1) ** -0.5
    if allowed is not None:
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
    weights = scores.softmax(-1)
    if allowed is not None:
        weights = weights.masked_fill(~allowed, 0.0)
    return F.dropout(weights, p, training) @ v


def sinusoids(positions, d, dtype):
    rates = 10000.0 ** (-torch.arange(0, d, 2, device=positions.device, dtype=torch.float64) / d)
    angles = positions.to(torch.float64)[..., None] * rates
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(-2)[..., :d].to(dtype)


class Attention(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h, self.past = h, None
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x, stepping=False):
        q, k, v = (t.unflatten(-1, (self.h, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        if stepping:
            if self.past is not None:
                k, v = torch.cat([self.past[0], k], 2), torch.cat([self.past[1], v], 2)
            self.past = k.detach(), v.detach()
        T, S = q.size(2), k.size(2)
        allowed = torch.ones(T, S, dtype=torch.bool, device=x.device).tril(S - T)
        return self.out(attend(q, k, v, allowed).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)
        self.attn = Attention(c.d_model, c.num_heads)
        self.ff = nn.Sequential(nn.Linear(c.d_model, c.d_ff), nn.ReLU(), nn.Linear(c.d_ff, c.d_model))

    def forward(self, x, stepping=False):
        x = x + self.attn(self.norm1(x), stepping)
        return x + self.ff(self.norm2(x))


class StatefulGPT(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.emb = nn.Embedding(c.vocab_size, c.d_model)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.num_layers))
        self.norm = nn.LayerNorm(c.d_model)
        self.head = nn.Linear(c.d_model, c.vocab_size, bias=False)
        self.at = 0

    def reset(self, batch):
        """Called before each cached run."""
        self.at = 0
        for block in self.blocks:
            block.attn.past = None

    def forward(self, tokens, stepping=False):
        start = self.at if stepping else 0
        x = self.emb(tokens)
        x = x + sinusoids(torch.arange(start, start + x.size(1), device=x.device), x.size(-1), x.dtype)
        if stepping:
            self.at += x.size(1)
        for block in self.blocks:
            x = block(x, stepping)
        return self.head(self.norm(x))

    @torch.no_grad()
    def chunked(self, chunks):
        self.reset(chunks[0].size(0))
        return torch.cat([self(chunk, stepping=True) for chunk in chunks], 1)

    @torch.no_grad()
    def generate(self, tokens, steps, use_cache):
        if use_cache:
            self.reset(tokens.size(0))
        fed = tokens
        for _ in range(steps):
            new = self(fed, stepping=use_cache)[:, -1].argmax(-1, keepdim=True)
            tokens = torch.cat([tokens, new], 1)
            fed = new if use_cache else tokens
        return tokens


class Attention2(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h, self.past = h, None
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x, stepping=False):
        q, k, v = (t.unflatten(-1, (self.h, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        if stepping:
            if self.past is not None:
                k, v = torch.cat([self.past[0], k], 2), torch.cat([self.past[1], v], 2)
            self.past = k.detach(), v.detach()
        T, S = q.size(2), k.size(2)
        allowed = torch.ones(T, S, dtype=torch.bool, device=x.device).tril(S - T)
        return self.out(attend(q, k, v, allowed).transpose(1, 2).flatten(2))


class Block2(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)
        self.attn = Attention2(c.d_model, c.num_heads)
        self.ff = nn.Sequential(nn.Linear(c.d_model, c.d_ff), nn.ReLU(), nn.Linear(c.d_ff, c.d_model))

    def forward(self, x, stepping=False):
        x = x + self.attn(self.norm1(x), stepping)
        return x + self.ff(self.norm2(x))


class StatefulGPT2(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.emb = nn.Embedding(c.vocab_size, c.d_model)
        self.blocks = nn.ModuleList(Block2(c) for _ in range(c.num_layers))
        self.norm = nn.LayerNorm(c.d_model)
        self.head = nn.Linear(c.d_model, c.vocab_size, bias=False)
        self.at = 0

    def reset(self, batch):
        """Called before each cached run."""
        past = self.blocks[0].attn.past
        if past is not None and past[0].size(0) == batch:
            self.at = 0
            return
        self.at = 0
        for block in self.blocks:
            block.attn.past = None

    def forward(self, tokens, stepping=False):
        start = self.at if stepping else 0
        x = self.emb(tokens)
        x = x + sinusoids(torch.arange(start, start + x.size(1), device=x.device), x.size(-1), x.dtype)
        if stepping:
            self.at += x.size(1)
        for block in self.blocks:
            x = block(x, stepping)
        return self.head(self.norm(x))

    @torch.no_grad()
    def chunked(self, chunks):
        self.reset(chunks[0].size(0))
        return torch.cat([self(chunk, stepping=True) for chunk in chunks], 1)

    @torch.no_grad()
    def generate(self, tokens, steps, use_cache):
        if use_cache:
            self.reset(tokens.size(0))
        fed = tokens
        for _ in range(steps):
            new = self(fed, stepping=use_cache)[:, -1].argmax(-1, keepdim=True)
            tokens = torch.cat([tokens, new], 1)
            fed = new if use_cache else tokens
        return tokens


right = Subject(
    kind="decoder",
    build=lambda c: StatefulGPT(c),
    forward=lambda m, tokens: m(tokens),
    declares={"causal": True, "positions": "sinusoidal", "norm": "layer", "norm_placement": "pre", "activation": "relu"},
    cache=lambda m, chunks, attention_mask=None: m.chunked(chunks),
    generate=lambda m, tokens, steps, use_cache: m.generate(tokens, steps, use_cache),
    mask_forms=(),
)

wrong = Subject(
    kind="decoder",
    build=lambda c: StatefulGPT2(c),
    forward=lambda m, tokens: m(tokens),
    declares={"causal": True, "positions": "sinusoidal", "norm": "layer", "norm_placement": "pre", "activation": "relu"},
    cache=lambda m, chunks, attention_mask=None: m.chunked(chunks),
    generate=lambda m, tokens, steps, use_cache: m.generate(tokens, steps, use_cache),
    mask_forms=(),
)

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


WHAT = (
    "The prefix mask opens whole rows (mask[:P] = True) instead of the prefix's own block (mask[:P, :P] = "
    'True), so the first P positions see all later tokens, not just the prefix.'
)
PLACE = 'prefix-LM mask of the decoder'


def attend(q, k, v, allowed=None, p=0.0, training=False):
    scores = q @ k.transpose(-2, -1) * q.size(-1) ** -0.5
    if allowed is not None:
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
    weights = scores.softmax(-1)
    if allowed is not None:
        weights = weights.masked_fill(~allowed, 0.0)
    return F.dropout(weights, p, training) @ v


def rope(x, positions):
    """Rotates channel i of x [B, H, T, K] against channel i + K/2."""
    half = x.size(-1) // 2
    exact = torch.promote_types(x.dtype, torch.float32)
    rates = 10000.0 ** (-torch.arange(half, device=x.device, dtype=exact) / half)
    angles = positions.to(exact)[:, None] * rates
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class RotaryAttention(nn.Module):
    def __init__(self, d, h, p=0.0):
        super().__init__()
        self.h, self.p = h, p
        self.q, self.k, self.v, self.o = (nn.Linear(d, d, bias=False) for _ in range(4))

    def forward(self, x, allowed=None):
        at = torch.arange(x.size(1), device=x.device)
        q, k, v = (f(x).unflatten(-1, (self.h, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = attend(rope(q, at), rope(k, at), v, allowed, self.p, self.training)
        return self.o(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, d, h, f, p):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.attn = RotaryAttention(d, h, p)
        self.ff = nn.Sequential(nn.Linear(d, f), nn.GELU(), nn.Linear(f, d), nn.Dropout(p))

    def forward(self, x, allowed=None):
        x = x + self.attn(self.norm1(x), allowed)
        return x + self.ff(self.norm2(x))


class PrefixDecoder(nn.Module):
    """The first 3 positions see one another both ways; what follows is causal."""

    prefix = 3

    def __init__(self, c):
        super().__init__()
        self.emb = nn.Embedding(c.vocab_size, c.d_model)
        self.blocks = nn.ModuleList(Block(c.d_model, c.num_heads, c.d_ff, c.dropout) for _ in range(c.num_layers))
        self.norm = nn.LayerNorm(c.d_model)
        self.head = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, tokens, attention_mask=None):
        T = tokens.size(1)
        allowed = torch.ones(T, T, dtype=torch.bool, device=tokens.device).tril()
        allowed[: self.prefix, : self.prefix] = True
        if attention_mask is not None:
            allowed = allowed & attention_mask[:, None, None, :]
        x = self.emb(tokens)
        for block in self.blocks:
            x = block(x, allowed)
        return self.head(self.norm(x))


class PrefixDecoder2(nn.Module):
    """The first 3 positions see one another both ways; what follows is causal."""

    prefix = 3

    def __init__(self, c):
        super().__init__()
        self.emb = nn.Embedding(c.vocab_size, c.d_model)
        self.blocks = nn.ModuleList(Block(c.d_model, c.num_heads, c.d_ff, c.dropout) for _ in range(c.num_layers))
        self.norm = nn.LayerNorm(c.d_model)
        self.head = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, tokens, attention_mask=None):
        T = tokens.size(1)
        allowed = torch.ones(T, T, dtype=torch.bool, device=tokens.device).tril()
        allowed[: self.prefix] = True
        if attention_mask is not None:
            allowed = allowed & attention_mask[:, None, None, :]
        x = self.emb(tokens)
        for block in self.blocks:
            x = block(x, allowed)
        return self.head(self.norm(x))


right = Subject(
    kind="decoder",
    build=lambda c: PrefixDecoder(c),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={"prefix": 3, "positions": "rotary", "layout": "halves", "norm": "layer", "norm_placement": "pre", "activation": "gelu", "padding_side": "right"},
    domain={"d_model": [16, 24, 32], "num_heads": [2, 4]},
    mask_forms=("padding",),
)

wrong = Subject(
    kind="decoder",
    build=lambda c: PrefixDecoder2(c),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={"prefix": 3, "positions": "rotary", "layout": "halves", "norm": "layer", "norm_placement": "pre", "activation": "gelu", "padding_side": "right"},
    domain={"d_model": [16, 24, 32], "num_heads": [2, 4]},
    mask_forms=("padding",),
)

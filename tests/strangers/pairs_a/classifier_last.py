import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


WHAT = (
    'The last real token is looked up at index mask.sum() - 1, which is right for padding on the right '
    'but, with padding on the left, picks an earlier position, often a padded one.'
)
PLACE = 'index of the last real token in last-token pooling, left padding'


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


class LastClassifier(nn.Module):
    """Causal; classifies from the last real token. Padding may stand on either side."""

    def __init__(self, c):
        super().__init__()
        self.emb = nn.Embedding(c.vocab_size, c.d_model)
        self.blocks = nn.ModuleList(Block(c.d_model, c.num_heads, c.d_ff, c.dropout) for _ in range(c.num_layers))
        self.norm, self.score = nn.LayerNorm(c.d_model), nn.Linear(c.d_model, c.num_classes, bias=False)

    def forward(self, tokens, attention_mask=None):
        B, T = tokens.shape
        allowed = torch.ones(T, T, dtype=torch.bool, device=tokens.device).tril()
        if attention_mask is None:
            last = torch.full((B,), T - 1, device=tokens.device)
        else:
            allowed = allowed & attention_mask[:, None, None, :]
            last = (attention_mask * torch.arange(T, device=tokens.device)).argmax(1)
        x = self.emb(tokens)
        for block in self.blocks:
            x = block(x, allowed)
        x = self.norm(x)
        return self.score(x[torch.arange(B, device=x.device), last])


class LastClassifier2(nn.Module):
    """Causal; classifies from the last real token. Padding may stand on either side."""

    def __init__(self, c):
        super().__init__()
        self.emb = nn.Embedding(c.vocab_size, c.d_model)
        self.blocks = nn.ModuleList(Block(c.d_model, c.num_heads, c.d_ff, c.dropout) for _ in range(c.num_layers))
        self.norm, self.score = nn.LayerNorm(c.d_model), nn.Linear(c.d_model, c.num_classes, bias=False)

    def forward(self, tokens, attention_mask=None):
        B, T = tokens.shape
        allowed = torch.ones(T, T, dtype=torch.bool, device=tokens.device).tril()
        if attention_mask is None:
            last = torch.full((B,), T - 1, device=tokens.device)
        else:
            allowed = allowed & attention_mask[:, None, None, :]
            last = (attention_mask.long().sum(1) - 1).clamp(min=0)
        x = self.emb(tokens)
        for block in self.blocks:
            x = block(x, allowed)
        x = self.norm(x)
        return self.score(x[torch.arange(B, device=x.device), last])


right = Subject(
    kind="classifier",
    build=lambda c: LastClassifier(c),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={"pooling": "last", "positions": "rotary", "layout": "halves", "padding_side": "both", "final_norm": True},
    domain={"d_model": [16, 24, 32], "num_heads": [2, 4]},
    mask_forms=("padding",),
)

wrong = Subject(
    kind="classifier",
    build=lambda c: LastClassifier2(c),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={"pooling": "last", "positions": "rotary", "layout": "halves", "padding_side": "both", "final_norm": True},
    domain={"d_model": [16, 24, 32], "num_heads": [2, 4]},
    mask_forms=("padding",),
)

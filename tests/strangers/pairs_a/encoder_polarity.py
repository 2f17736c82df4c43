import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


WHAT = (
    'The attention sublayer takes key_padding_mask with True = padding, but the encoder hands it '
    'attention_mask (True = real) without inverting it, so with a mask real tokens are hidden and padding '
    'is attended.'
)
PLACE = 'polarity of the mask handed from the encoder to attention'


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


class MultiHead(nn.Module):
    """key_padding_mask: True marks padding, as in torch.nn."""

    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.in_proj, self.out_proj = nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x, key_padding_mask=None):
        at = torch.arange(x.size(1), device=x.device)
        q, k, v = (t.unflatten(-1, (self.h, -1)).transpose(1, 2) for t in self.in_proj(x).chunk(3, -1))
        allowed = None if key_padding_mask is None else ~key_padding_mask[:, None, None, :]
        return self.out_proj(attend(rope(q, at), rope(k, at), v, allowed).transpose(1, 2).flatten(2))


class PostNormLayer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.attn = MultiHead(c.d_model, c.num_heads)
        self.linear1, self.linear2 = nn.Linear(c.d_model, c.d_ff), nn.Linear(c.d_ff, c.d_model)
        self.norm1, self.norm2 = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)
        self.dropout = nn.Dropout(c.dropout)

    def forward(self, x, key_padding_mask=None):
        x = self.norm1(x + self.dropout(self.attn(x, key_padding_mask)))
        return self.norm2(x + self.dropout(self.linear2(self.linear1(x).relu())))


class PostNormEncoder(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.emb = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList(PostNormLayer(c) for _ in range(c.num_layers))

    def forward(self, tokens, attention_mask=None):
        padding = None if attention_mask is None else ~attention_mask
        x = self.emb(tokens)
        for layer in self.layers:
            x = layer(x, padding)
        return x


class MultiHead2(nn.Module):
    """key_padding_mask: True marks padding, as in torch.nn."""

    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.in_proj, self.out_proj = nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x, key_padding_mask=None):
        at = torch.arange(x.size(1), device=x.device)
        q, k, v = (t.unflatten(-1, (self.h, -1)).transpose(1, 2) for t in self.in_proj(x).chunk(3, -1))
        allowed = None if key_padding_mask is None else ~key_padding_mask[:, None, None, :]
        return self.out_proj(attend(rope(q, at), rope(k, at), v, allowed).transpose(1, 2).flatten(2))


class PostNormLayer2(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.attn = MultiHead2(c.d_model, c.num_heads)
        self.linear1, self.linear2 = nn.Linear(c.d_model, c.d_ff), nn.Linear(c.d_ff, c.d_model)
        self.norm1, self.norm2 = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)
        self.dropout = nn.Dropout(c.dropout)

    def forward(self, x, key_padding_mask=None):
        x = self.norm1(x + self.dropout(self.attn(x, key_padding_mask)))
        return self.norm2(x + self.dropout(self.linear2(self.linear1(x).relu())))


class PostNormEncoder2(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.emb = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList(PostNormLayer2(c) for _ in range(c.num_layers))

    def forward(self, tokens, attention_mask=None):
        padding = attention_mask
        x = self.emb(tokens)
        for layer in self.layers:
            x = layer(x, padding)
        return x


right = Subject(
    kind="encoder",
    build=lambda c: PostNormEncoder(c),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={"causal": False, "positions": "rotary", "layout": "halves", "norm_placement": "post", "activation": "relu"},
    domain={"d_model": [16, 24, 32], "num_heads": [2, 4]},
    mask_forms=("padding",),
)

wrong = Subject(
    kind="encoder",
    build=lambda c: PostNormEncoder2(c),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={"causal": False, "positions": "rotary", "layout": "halves", "norm_placement": "post", "activation": "relu"},
    domain={"d_model": [16, 24, 32], "num_heads": [2, 4]},
    mask_forms=("padding",),
)

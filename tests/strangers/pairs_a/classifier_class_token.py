import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


WHAT = (
    'A class token is put in front of the sequence but the mask is extended at its end (F.pad(mask, (0, '
    '1))) instead of its front, so the mask is shifted by one against the tokens: the last real token is '
    'hidden and the last padded one seen.'
)
PLACE = 'extension of the padding mask by the class token in the classifier'


def attend(q, k, v, allowed=None, p=0.0, training=False):
    scores = q @ k.transpose(-2, -1) * q.size(-1) ** -0.5
    if allowed is not None:
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
    weights = scores.softmax(-1)
    if allowed is not None:
        weights = weights.masked_fill(~allowed, 0.0)
    return F.dropout(weights, p, training) @ v


class SelfAttention(nn.Module):
    def __init__(self, d, h, p=0.0):
        super().__init__()
        self.h, self.p = h, p
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x, allowed=None):
        q, k, v = (t.unflatten(-1, (self.h, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.out(attend(q, k, v, allowed, self.p, self.training).transpose(1, 2).flatten(2))


def sinusoids(positions, d, dtype):
    rates = 10000.0 ** (-torch.arange(0, d, 2, device=positions.device, dtype=torch.float64) / d)
    angles = positions.to(torch.float64)[..., None] * rates
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(-2)[..., :d].to(dtype)


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.attn = SelfAttention(c.d_model, c.num_heads, c.dropout)
        self.up, self.down = nn.Linear(c.d_model, c.d_ff), nn.Linear(c.d_ff, c.d_model)
        self.norm1, self.norm2 = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)

    def forward(self, x, allowed=None):
        x = self.norm1(x + self.attn(x, allowed))
        return self.norm2(x + self.down(F.gelu(self.up(x))))


class TokenClassifier(nn.Module):
    """BERT-like, with the class token put in front by the model itself; padding stands on the right."""

    def __init__(self, c):
        super().__init__()
        self.emb = nn.Embedding(c.vocab_size, c.d_model)
        self.cls = nn.Parameter(0.02 * torch.randn(c.d_model))
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.num_layers))
        self.head = nn.Linear(c.d_model, c.num_classes)

    def forward(self, tokens, attention_mask=None):
        x = self.emb(tokens)
        x = torch.cat([self.cls.expand(x.size(0), 1, -1), x], 1)
        x = x + sinusoids(torch.arange(x.size(1), device=x.device), x.size(-1), x.dtype)
        allowed = None
        if attention_mask is not None:
            mask = F.pad(attention_mask, (1, 0), value=True)
            allowed = mask[:, None, None, :]
        for layer in self.layers:
            x = layer(x, allowed)
        return self.head(x[:, 0])


class Layer2(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.attn = SelfAttention(c.d_model, c.num_heads, c.dropout)
        self.up, self.down = nn.Linear(c.d_model, c.d_ff), nn.Linear(c.d_ff, c.d_model)
        self.norm1, self.norm2 = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)

    def forward(self, x, allowed=None):
        x = self.norm1(x + self.attn(x, allowed))
        return self.norm2(x + self.down(F.gelu(self.up(x))))


class TokenClassifier2(nn.Module):
    """BERT-like, with the class token put in front by the model itself; padding stands on the right."""

    def __init__(self, c):
        super().__init__()
        self.emb = nn.Embedding(c.vocab_size, c.d_model)
        self.cls = nn.Parameter(0.02 * torch.randn(c.d_model))
        self.layers = nn.ModuleList(Layer2(c) for _ in range(c.num_layers))
        self.head = nn.Linear(c.d_model, c.num_classes)

    def forward(self, tokens, attention_mask=None):
        x = self.emb(tokens)
        x = torch.cat([self.cls.expand(x.size(0), 1, -1), x], 1)
        x = x + sinusoids(torch.arange(x.size(1), device=x.device), x.size(-1), x.dtype)
        allowed = None
        if attention_mask is not None:
            mask = F.pad(attention_mask, (0, 1), value=True)
            allowed = mask[:, None, None, :]
        for layer in self.layers:
            x = layer(x, allowed)
        return self.head(x[:, 0])


right = Subject(
    kind="classifier",
    build=lambda c: TokenClassifier(c),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={"pooling": "cls", "extra_tokens": 1, "positions": "sinusoidal", "padding_side": "right", "norm_placement": "post", "activation": "gelu"},
    mask_forms=("padding",),
)

wrong = Subject(
    kind="classifier",
    build=lambda c: TokenClassifier2(c),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={"pooling": "cls", "extra_tokens": 1, "positions": "sinusoidal", "padding_side": "right", "norm_placement": "post", "activation": "gelu"},
    mask_forms=("padding",),
)

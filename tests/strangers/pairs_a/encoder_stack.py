import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


WHAT = (
    'The stack is built as nn.ModuleList([block] * n), so all layers are one and the same module with '
    'shared parameters although num_layers separate layers are claimed.'
)
PLACE = "construction of the encoder's stack of layers"


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


class Block(nn.Module):
    def __init__(self, d, h, f, p):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.attn = SelfAttention(d, h, p)
        self.ff = nn.Sequential(nn.Linear(d, f), nn.GELU(), nn.Linear(f, d), nn.Dropout(p))

    def forward(self, x, allowed=None):
        x = x + self.attn(self.norm1(x), allowed)
        return x + self.ff(self.norm2(x))


def sinusoids(positions, d, dtype):
    rates = 10000.0 ** (-torch.arange(0, d, 2, device=positions.device, dtype=torch.float64) / d)
    angles = positions.to(torch.float64)[..., None] * rates
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(-2)[..., :d].to(dtype)


class Encoder(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.emb = nn.Embedding(c.vocab_size, c.d_model)
        self.blocks = nn.ModuleList(Block(c.d_model, c.num_heads, c.d_ff, c.dropout) for _ in range(c.num_layers))
        self.norm = nn.LayerNorm(c.d_model)

    def forward(self, tokens, attention_mask=None):
        x = self.emb(tokens)
        x = x + sinusoids(torch.arange(tokens.size(1), device=x.device), x.size(-1), x.dtype)
        allowed = None if attention_mask is None else attention_mask[:, None, None, :]
        for block in self.blocks:
            x = block(x, allowed)
        return self.norm(x)


class Encoder2(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.emb = nn.Embedding(c.vocab_size, c.d_model)
        block = Block(c.d_model, c.num_heads, c.d_ff, c.dropout)
        self.blocks = nn.ModuleList([block] * c.num_layers)
        self.norm = nn.LayerNorm(c.d_model)

    def forward(self, tokens, attention_mask=None):
        x = self.emb(tokens)
        x = x + sinusoids(torch.arange(tokens.size(1), device=x.device), x.size(-1), x.dtype)
        allowed = None if attention_mask is None else attention_mask[:, None, None, :]
        for block in self.blocks:
            x = block(x, allowed)
        return self.norm(x)


right = Subject(
    kind="encoder",
    build=lambda c: Encoder(c),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={"causal": False, "positions": "sinusoidal", "padding_side": "right", "stacked": True, "shared_layers": False, "final_norm": True},
    domain={"num_layers": [2, 3]},
    mask_forms=("padding",),
)

wrong = Subject(
    kind="encoder",
    build=lambda c: Encoder2(c),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={"causal": False, "positions": "sinusoidal", "padding_side": "right", "stacked": True, "shared_layers": False, "final_norm": True},
    domain={"num_layers": [2, 3]},
    mask_forms=("padding",),
)

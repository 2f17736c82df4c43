import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


WHAT = (
    'On the path with an attention_mask the encoder returns before the final LayerNorm, so an all-ones '
    'mask gives other outputs than no mask.'
)
PLACE = 'final normalisation of the encoder, path with a padding mask'


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


class MaskedEncoder(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.emb = nn.Embedding(c.vocab_size, c.d_model)
        self.blocks = nn.ModuleList(Block(c.d_model, c.num_heads, c.d_ff, c.dropout) for _ in range(c.num_layers))
        self.norm = nn.LayerNorm(c.d_model)

    def forward(self, tokens, attention_mask=None):
        x = self.emb(tokens)
        if attention_mask is None:
            for block in self.blocks:
                x = block(x)
            return self.norm(x)
        for block in self.blocks:
            x = block(x, attention_mask[:, None, None, :])
        return self.norm(x).masked_fill(~attention_mask[:, :, None], 0.0)


class MaskedEncoder2(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.emb = nn.Embedding(c.vocab_size, c.d_model)
        self.blocks = nn.ModuleList(Block(c.d_model, c.num_heads, c.d_ff, c.dropout) for _ in range(c.num_layers))
        self.norm = nn.LayerNorm(c.d_model)

    def forward(self, tokens, attention_mask=None):
        x = self.emb(tokens)
        if attention_mask is None:
            for block in self.blocks:
                x = block(x)
            return self.norm(x)
        for block in self.blocks:
            x = block(x, attention_mask[:, None, None, :])
        return x.masked_fill(~attention_mask[:, :, None], 0.0)


right = Subject(
    kind="encoder",
    build=lambda c: MaskedEncoder(c),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={"causal": False, "positions": "rotary", "layout": "halves", "final_norm": True, "norm_placement": "pre"},
    domain={"d_model": [16, 24, 32], "num_heads": [2, 4]},
    mask_forms=("padding",),
)

wrong = Subject(
    kind="encoder",
    build=lambda c: MaskedEncoder2(c),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={"causal": False, "positions": "rotary", "layout": "halves", "final_norm": True, "norm_placement": "pre"},
    domain={"d_model": [16, 24, 32], "num_heads": [2, 4]},
    mask_forms=("padding",),
)

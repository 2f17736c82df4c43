import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


WHAT = (
    'With a mask the position ids are the cumulative sum of the mask over the batch axis (dim 0) instead '
    "of time (dim 1), so all tokens of a sample get the same position, the sample's index."
)
PLACE = 'position ids computed from the padding mask in the encoder'


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


class PositionedEncoder(nn.Module):
    """Positions count real tokens, so padding may stand on either side."""

    def __init__(self, c):
        super().__init__()
        self.emb = nn.Embedding(c.vocab_size, c.d_model)
        self.pos = nn.Embedding(c.max_len, c.d_model)
        self.blocks = nn.ModuleList(Block(c.d_model, c.num_heads, c.d_ff, c.dropout) for _ in range(c.num_layers))
        self.norm = nn.LayerNorm(c.d_model)

    def forward(self, tokens, attention_mask=None):
        if attention_mask is None:
            ids, allowed = torch.arange(tokens.size(1), device=tokens.device)[None], None
        else:
            ids = (attention_mask.long().cumsum(1) - 1).clamp(min=0)
            allowed = attention_mask[:, None, None, :]
        x = self.emb(tokens) + self.pos(ids)
        for block in self.blocks:
            x = block(x, allowed)
        return self.norm(x)


class PositionedEncoder2(nn.Module):
    """Positions count real tokens, so padding may stand on either side."""

    def __init__(self, c):
        super().__init__()
        self.emb = nn.Embedding(c.vocab_size, c.d_model)
        self.pos = nn.Embedding(c.max_len, c.d_model)
        self.blocks = nn.ModuleList(Block(c.d_model, c.num_heads, c.d_ff, c.dropout) for _ in range(c.num_layers))
        self.norm = nn.LayerNorm(c.d_model)

    def forward(self, tokens, attention_mask=None):
        if attention_mask is None:
            ids, allowed = torch.arange(tokens.size(1), device=tokens.device)[None], None
        else:
            ids = (attention_mask.long().cumsum(0) - 1).clamp(min=0)
            allowed = attention_mask[:, None, None, :]
        x = self.emb(tokens) + self.pos(ids)
        for block in self.blocks:
            x = block(x, allowed)
        return self.norm(x)


right = Subject(
    kind="encoder",
    build=lambda c: PositionedEncoder(c),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={"causal": False, "positions": "learned", "beyond_max_len": "error", "padding_side": "both", "final_norm": True},
    mask_forms=("padding",),
)

wrong = Subject(
    kind="encoder",
    build=lambda c: PositionedEncoder2(c),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={"causal": False, "positions": "learned", "beyond_max_len": "error", "padding_side": "both", "final_norm": True},
    mask_forms=("padding",),
)

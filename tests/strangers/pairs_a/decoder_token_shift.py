import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


WHAT = (
    'The token shift is done with torch.roll instead of a shift that fills with zeros, so the last '
    "token's channels wrap around to the first position: the future leaks into the first output and from "
    'there into all.'
)
PLACE = "token shift at the input of the decoder's layers"


def attend(q, k, v, allowed=None, p=0.0, training=False):
    scores = q @ k.transpose(-2, -1) * q.size(-1) ** -0.5
    if allowed is not None:
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
    weights = scores.softmax(-1)
    if allowed is not None:
        weights = weights.masked_fill(~allowed, 0.0)
    return F.dropout(weights, p, training) @ v


class Layer(nn.Module):
    """Half of the channels come from the previous token; there are no other positions."""

    def __init__(self, c):
        super().__init__()
        self.h = c.num_heads
        self.norm1, self.norm2 = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)
        self.qkv, self.out = nn.Linear(c.d_model, 3 * c.d_model), nn.Linear(c.d_model, c.d_model)
        self.up, self.down = nn.Linear(c.d_model, c.d_ff), nn.Linear(c.d_ff, c.d_model)

    def shift(self, x, mask):
        if mask is not None:
            x = x.masked_fill(~mask[..., None], 0.0)
        now, before = x.tensor_split(2, -1)
        before = F.pad(before, (0, 0, 1, 0))[:, :-1]
        return torch.cat([now, before], -1)

    def forward(self, x, mask=None):
        T = x.size(1)
        h = self.shift(self.norm1(x), mask)
        q, k, v = (t.unflatten(-1, (self.h, -1)).transpose(1, 2) for t in self.qkv(h).chunk(3, -1))
        allowed = torch.ones(T, T, dtype=torch.bool, device=x.device).tril()
        if mask is not None:
            allowed = allowed & mask[:, None, None, :]
        x = x + self.out(attend(q, k, v, allowed).transpose(1, 2).flatten(2))
        return x + self.down(F.relu(self.up(self.norm2(x))))


class ShiftGPT(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.emb = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.num_layers))
        self.norm = nn.LayerNorm(c.d_model)
        self.head = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, tokens, attention_mask=None):
        x = self.emb(tokens)
        for layer in self.layers:
            x = layer(x, attention_mask)
        return self.head(self.norm(x))


class Layer2(nn.Module):
    """Half of the channels come from the previous token; there are no other positions."""

    def __init__(self, c):
        super().__init__()
        self.h = c.num_heads
        self.norm1, self.norm2 = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)
        self.qkv, self.out = nn.Linear(c.d_model, 3 * c.d_model), nn.Linear(c.d_model, c.d_model)
        self.up, self.down = nn.Linear(c.d_model, c.d_ff), nn.Linear(c.d_ff, c.d_model)

    def shift(self, x, mask):
        if mask is not None:
            x = x.masked_fill(~mask[..., None], 0.0)
        now, before = x.tensor_split(2, -1)
        before = before.roll(1, dims=1)
        return torch.cat([now, before], -1)

    def forward(self, x, mask=None):
        T = x.size(1)
        h = self.shift(self.norm1(x), mask)
        q, k, v = (t.unflatten(-1, (self.h, -1)).transpose(1, 2) for t in self.qkv(h).chunk(3, -1))
        allowed = torch.ones(T, T, dtype=torch.bool, device=x.device).tril()
        if mask is not None:
            allowed = allowed & mask[:, None, None, :]
        x = x + self.out(attend(q, k, v, allowed).transpose(1, 2).flatten(2))
        return x + self.down(F.relu(self.up(self.norm2(x))))


class ShiftGPT2(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.emb = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList(Layer2(c) for _ in range(c.num_layers))
        self.norm = nn.LayerNorm(c.d_model)
        self.head = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, tokens, attention_mask=None):
        x = self.emb(tokens)
        for layer in self.layers:
            x = layer(x, attention_mask)
        return self.head(self.norm(x))


right = Subject(
    kind="decoder",
    build=lambda c: ShiftGPT(c),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={"causal": True, "positions": "other", "norm": "layer", "norm_placement": "pre", "activation": "relu", "structure": "other"},
    mask_forms=("padding",),
)

wrong = Subject(
    kind="decoder",
    build=lambda c: ShiftGPT2(c),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={"causal": True, "positions": "other", "norm": "layer", "norm_placement": "pre", "activation": "relu", "structure": "other"},
    mask_forms=("padding",),
)

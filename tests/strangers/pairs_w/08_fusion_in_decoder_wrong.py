WHAT = "Without a mask the one that is made counts the tokens that fill up the last passage as real, so that encoder and decoder attend to phantom tokens (line 61)."

"""Fusion in decoder: the source is cut into passages that are encoded apart; the decoder attends to all of them."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

PASSAGE = 4


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.q, self.kv, self.o = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(width, width)

    def forward(self, x, memory, allowed):
        """`allowed` is broadcast to [B, H, T, S]."""
        q = self.q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = (z.unflatten(-1, (self.heads, -1)).transpose(1, 2) for z in self.kv(memory).chunk(2, dim=-1))
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, width, heads, inner, crosses):
        super().__init__()
        self.norm_self, self.own = nn.LayerNorm(width), Attention(width, heads)
        self.norm_cross, self.cross = (nn.LayerNorm(width), Attention(width, heads)) if crosses else (None, None)
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, inner), nn.ReLU(), nn.Linear(inner, width))

    def forward(self, x, allowed, memory=None, memory_allowed=None):
        y = self.norm_self(x)
        x = x + self.own(y, y, allowed)
        if self.cross is not None:
            x = x + self.cross(self.norm_cross(x), memory, memory_allowed)
        return x + self.mlp(self.norm_mlp(x))


class FusionInDecoder(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.source, self.target = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.vocab_size, c.d_model)
        self.within, self.places = nn.Embedding(PASSAGE, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.encoder = nn.ModuleList([Layer(c.d_model, c.num_heads, c.d_ff, False) for _ in range(c.num_layers)])
        self.decoder = nn.ModuleList([Layer(c.d_model, c.num_heads, c.d_ff, True) for _ in range(c.num_layers)])
        self.norm_source, self.norm_target = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)
        self.head = nn.Linear(c.d_model, c.vocab_size)

    def encode(self, source, source_mask):
        """States [B, S', D] and which of them are real; S' is S, filled up to whole passages."""
        length = source.shape[1]
        short = -length % PASSAGE
        source = F.pad(source, (0, short))
        if source_mask is None:
            source_mask = torch.ones_like(source, dtype=torch.bool)
        else:
            source_mask = F.pad(source_mask, (0, short), value=False)
        pieces, real = source.reshape(-1, PASSAGE), source_mask.reshape(-1, PASSAGE)
        x = self.source(pieces) + self.within.weight
        for layer in self.encoder:
            x = layer(x, real[:, None, None, :])
        return self.norm_source(x).reshape(*source.shape, -1), source_mask

    def forward(self, source, target, source_mask=None, target_mask=None):
        memory, real = self.encode(source, source_mask)
        T = target.shape[1]
        allowed = torch.ones(T, T, dtype=torch.bool, device=target.device).tril()
        if target_mask is not None:
            allowed = allowed & target_mask[:, None, None, :]
        x = self.target(target) + self.places.weight[:T]
        for layer in self.decoder:
            x = layer(x, allowed, memory, real[:, None, None, :])
        return self.head(self.norm_target(x))


subject = Subject(
    kind="encoder_decoder",
    name="fusion in decoder",
    build=FusionInDecoder,
    forward=lambda model, source, target, source_mask=None, target_mask=None: model(source, target, source_mask, target_mask),
    declares={
        "causal": True,
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "pre",
        "activation": "relu",
        "padding_side": "right",
        "sparse": True,
        "structure": "other",
    },
)

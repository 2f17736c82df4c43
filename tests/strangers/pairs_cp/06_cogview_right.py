"""Encoder with sandwich norms and the relaxed softmax of CogView, its one layer used again and again as in ALBERT."""

from math import sqrt

import torch
from torch import nn

from veriformer.properties import Subject

ALPHA = 32.0  # keeps q k^T small where it is stored in half precision


class SandwichLayer(nn.Module):
    def __init__(self, d_model, n_heads, d_ff):
        super().__init__()
        self.n_heads, self.d_head = n_heads, d_model // n_heads
        self.norms = nn.ModuleDict({k: nn.LayerNorm(d_model) for k in ("attn_in", "attn_out", "ffn_in", "ffn_out")})
        self.proj = nn.ModuleDict({k: nn.Linear(d_model, d_model) for k in "qkvo"})
        self.fc1, self.fc2 = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)

    def attention(self, h, seen):
        q, k, v = (self.proj[n](h).unflatten(-1, (self.n_heads, self.d_head)).transpose(1, 2) for n in "qkv")
        scores = (q / (ALPHA * sqrt(self.d_head))) @ k.transpose(-1, -2)
        scores = scores.masked_fill(~seen, -1e4)
        largest = scores.amax(-1, keepdim=True).detach()
        scores = (scores - largest) * ALPHA
        weights = torch.softmax(scores, -1) * seen
        return self.proj["o"]((weights @ v).transpose(1, 2).flatten(-2))

    def forward(self, x, seen):
        n = self.norms
        x = x + n["attn_out"](self.attention(n["attn_in"](x), seen))
        return x + n["ffn_out"](self.fc2(nn.functional.gelu(self.fc1(n["ffn_in"](x)))))


class SharedSandwichEncoder(nn.Module):
    def __init__(self, vocab_size, d_model, n_heads, n_layers, d_ff, max_len, d_embed=6):
        super().__init__()
        self.word, self.position = nn.Embedding(vocab_size, d_embed), nn.Embedding(max_len, d_embed)
        self.widen = nn.Linear(d_embed, d_model)
        self.layer, self.repeats = SandwichLayer(d_model, n_heads, d_ff), n_layers
        self.final = nn.LayerNorm(d_model)

    def forward(self, tokens, attention_mask=None):
        batch, length = tokens.shape
        if attention_mask is None:
            attention_mask = tokens.new_ones(batch, length, dtype=torch.bool)
        seen = attention_mask.view(batch, 1, 1, length)
        x = self.widen(self.word(tokens) + self.position(torch.arange(length, device=tokens.device)))
        for _ in range(self.repeats):
            x = self.layer(x, seen)
        return self.final(x)


subject = Subject(
    kind="encoder",
    build=lambda c: SharedSandwichEncoder(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "causal": False, "positions": "learned", "padding_side": "right", "attention_scale": "1/sqrt(d_head)",
        "norm": "layer", "norm_placement": "other", "final_norm": True, "shared_layers": True, "activation": "gelu",
    },
)

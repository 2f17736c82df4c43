"""A ViT-like pre-LN encoder over tokens: learned positions, fused query-key-value projection."""
import math

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.h = c.num_heads
        self.n1, self.n2 = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)
        self.qkv, self.proj = nn.Linear(c.d_model, 3 * c.d_model), nn.Linear(c.d_model, c.d_model)
        self.fc1, self.fc2 = nn.Linear(c.d_model, c.d_ff), nn.Linear(c.d_ff, c.d_model)

    def forward(self, x, allowed):
        b, t, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, self.h, d // self.h).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, d))
        return x + self.fc2(F.gelu(self.fc1(self.n2(x))))


class Encoder(nn.Module):
    def __init__(self, c, bad):
        super().__init__()
        self.tok = nn.Embedding(c.vocab_size, c.d_model)
        pos = torch.randn(1, c.max_len, c.d_model) * 0.5
        self.pos = pos if bad else nn.Parameter(pos)
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.num_layers))
        self.norm = nn.LayerNorm(c.d_model)

    def forward(self, tokens, attention_mask=None):
        x = self.tok(tokens)
        x = x + self.pos[:, : tokens.size(1)].to(x)
        allowed = None if attention_mask is None else attention_mask[:, None, None, :].expand(-1, 1, x.size(1), -1)
        for layer in self.layers:
            x = layer(x, allowed)
        return self.norm(x)


def subject(bad):
    return Subject(
        kind="encoder", build=lambda c: Encoder(c, bad), forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
        declares={"causal": False, "positions": "learned", "norm": "layer", "norm_placement": "pre", "final_norm": True,
                  "activation": "gelu", "padding_side": "right"})


right, wrong = subject(False), subject(True)
WHAT = "The table of learned positions is a plain tensor, not a parameter: it is not trained, saved or moved."
PLACE = "position embedding (not registered as a parameter)"

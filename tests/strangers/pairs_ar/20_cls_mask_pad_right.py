"""A BERT-like classifier: a class token before the tokens, a padding mask widened for it."""
import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


class Block(nn.Module):
    def __init__(self, d, h, ff):
        super().__init__()
        self.h = h
        self.in_proj, self.out_proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.fc1, self.fc2 = nn.Linear(d, ff), nn.Linear(ff, d)

    def forward(self, x, allowed):
        q, k, v = self.in_proj(self.norm1(x)).chunk(3, -1)
        q, k, v = (z.unflatten(-1, (self.h, -1)).transpose(1, 2) for z in (q, k, v))
        a = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        x = x + self.out_proj(a.transpose(1, 2).flatten(2))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class Classifier(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.cls = nn.Parameter(torch.randn(1, 1, c.d_model))
        self.embed = nn.Embedding(c.vocab_size, c.d_model)
        self.pos = nn.Parameter(torch.randn(c.max_len + 1, c.d_model))
        self.blocks = nn.ModuleList(Block(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers))
        self.norm, self.head = nn.LayerNorm(c.d_model), nn.Linear(c.d_model, c.num_classes)

    def forward(self, tokens, mask=None):
        B, T = tokens.shape
        x = torch.cat([self.cls.expand(B, -1, -1), self.embed(tokens)], dim=1)
        x = x + self.pos[: T + 1]
        allowed = None
        if mask is not None:
            allowed = F.pad(mask, (1, 0), value=True)[:, None, None, :]
        for block in self.blocks:
            x = block(x, allowed)
        return self.head(self.norm(x)[:, 0])


subject = Subject(
    kind="classifier",
    name="classifier with a class token",
    build=Classifier,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "pooling": "cls",
        "extra_tokens": 1,
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "pre",
        "activation": "gelu",
        "padding_side": "right",
    },
)

"""A text classifier built like a ViT: a class token in front, fused attention, dropout where the config asks for it."""

from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject


class Attention(nn.Module):
    def __init__(self, dim, num_heads, attn_drop=0.0, proj_drop=0.0):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, dim * 3)
        self.attn_drop = attn_drop
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x, mask=None):
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        x = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            dropout_p=self.attn_drop if self.training else 0.0,
        )
        return self.proj_drop(self.proj(x.transpose(1, 2).reshape(B, N, C)))


class Mlp(nn.Module):
    def __init__(self, dim, hidden, drop=0.0):
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim)
        self.drop = nn.Dropout(drop)

    def forward(self, x):
        return self.drop(self.fc2(self.act(self.fc1(x))))


class Block(nn.Module):
    def __init__(self, dim, num_heads, hidden, drop, norm_layer):
        super().__init__()
        self.norm1 = norm_layer(dim)
        self.attn = Attention(dim, num_heads, attn_drop=drop, proj_drop=drop)
        self.norm2 = norm_layer(dim)
        self.mlp = Mlp(dim, hidden, drop)

    def forward(self, x, mask=None):
        x = x + self.attn(self.norm1(x), mask)
        return x + self.mlp(self.norm2(x))


class TextTransformer(nn.Module):
    def __init__(self, vocab_size, num_classes, dim, depth, num_heads, hidden, max_len, drop_rate):
        super().__init__()
        norm_layer = partial(nn.LayerNorm, eps=1e-6)
        self.embed = nn.Embedding(vocab_size, dim)
        self.cls_token = nn.Parameter(torch.randn(1, 1, dim) * 0.02)
        self.pos_embed = nn.Parameter(torch.randn(1, max_len + 1, dim) * 0.02)
        self.blocks = nn.ModuleList([Block(dim, num_heads, hidden, drop_rate, norm_layer) for _ in range(depth)])
        self.norm = norm_layer(dim)
        self.head = nn.Linear(dim, num_classes)

    def forward(self, tokens, mask=None):
        B, N = tokens.shape
        x = torch.cat([self.cls_token.expand(B, -1, -1), self.embed(tokens)], dim=1)
        x = x + self.pos_embed[:, : N + 1]
        if mask is not None:
            mask = F.pad(mask, (1, 0), value=True)[:, None, None, :]
        for blk in self.blocks:
            x = blk(x, mask)
        return self.head(self.norm(x)[:, 0])


subject = Subject(
    kind="classifier",
    name="class token",
    build=lambda c: TextTransformer(
        c.vocab_size, c.num_classes, c.d_model, c.num_layers, c.num_heads, c.d_ff, c.max_len, c.dropout
    ),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "causal": False,
        "positions": "learned",
        "pooling": "cls",
        "extra_tokens": 1,
        "norm": "layer",
        "norm_placement": "pre",
        "activation": "gelu",
        "padding_side": "right",
    },
)

"""ViT-like classifier over tokens: a learned class token in front of the input, learned positions, pre-norm, head on the class token.

Unusual: the class token is a parameter, not one of the input's tokens, and takes position 0; it is never masked, so a sample of
nothing but padding still has an output. QKV by one matrix, reshaped to [3, B, H, T, d] as timm does; the head is an MLP with tanh.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject


class Attention(nn.Module):
    def __init__(self, dim, num_heads, proj_drop):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.qkv = nn.Linear(dim, dim * 3)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x, attn_mask=None):
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        x = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask)
        return self.proj_drop(self.proj(x.transpose(1, 2).reshape(B, N, C)))


class Mlp(nn.Module):
    def __init__(self, dim, hidden, drop):
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.act = nn.GELU()
        self.drop1 = nn.Dropout(drop)
        self.fc2 = nn.Linear(hidden, dim)
        self.drop2 = nn.Dropout(drop)

    def forward(self, x):
        return self.drop2(self.fc2(self.drop1(self.act(self.fc1(x)))))


class Block(nn.Module):
    def __init__(self, dim, heads, hidden, drop):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = Attention(dim, heads, drop)
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = Mlp(dim, hidden, drop)

    def forward(self, x, attn_mask=None):
        x = x + self.attn(self.norm1(x), attn_mask)
        return x + self.mlp(self.norm2(x))


class TokenViT(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed = nn.Embedding(c.vocab_size, c.d_model)
        self.cls_token = nn.Parameter(torch.randn(1, 1, c.d_model) * 0.02)
        self.pos_embed = nn.Parameter(torch.randn(1, 1 + c.max_len, c.d_model) * 0.02)
        self.pos_drop = nn.Dropout(c.dropout)
        self.blocks = nn.ModuleList([Block(c.d_model, c.num_heads, c.d_ff, c.dropout) for _ in range(c.num_layers)])
        self.norm = nn.LayerNorm(c.d_model, eps=1e-6)
        self.pre_logits = nn.Linear(c.d_model, c.d_model)
        self.head = nn.Linear(c.d_model, c.num_classes)

    def forward(self, tokens, attention_mask=None):
        x = self.embed(tokens)
        x = torch.cat([self.cls_token.expand(x.size(0), -1, -1), x], dim=1)
        if x.size(1) > self.pos_embed.size(1):
            raise ValueError("the sequence is longer than the table of positions")
        x = self.pos_drop(x + self.pos_embed[:, : x.size(1)])
        attn_mask = None
        if attention_mask is not None:
            attn_mask = F.pad(attention_mask, (1, 0), value=True)[:, None, None, :].expand(-1, 1, x.size(1), -1)
        for block in self.blocks:
            x = block(x, attn_mask)
        return self.head(torch.tanh(self.pre_logits(self.norm(x)[:, 0])))


COMMON = dict(
    kind="classifier",
    build=TokenViT,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
)
undeclared = Subject(**COMMON)
declared = Subject(
    **COMMON,
    declares={
        "causal": False,
        "pooling": "cls",
        "extra_tokens": 1,
        "positions": "learned",
        "padding_side": "right",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu",
        "bias": True,
        "output_bias": True,
        "structure": "other",
    },
)

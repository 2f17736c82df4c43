"""A ViT-like classifier (timm's Block, a class token in front) over tokens with padding."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

WHAT = "The padding mask is extended for the class token at the end instead of in front: it is shifted by one."
CAUSE = (
    "The padding mask is shifted by one against the tokens (the class token's entry was appended at its end, not put "
    "in front), so the last real token is hidden and the last padded one is seen."
)


class Mlp(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim)

    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)))


class Attention(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads, self.scale = num_heads, (dim // num_heads) ** -0.5
        self.qkv, self.proj = nn.Linear(dim, dim * 3), nn.Linear(dim, dim)

    def forward(self, x, mask):
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4).unbind(0)
        attn = (q * self.scale) @ k.transpose(-2, -1)
        attn = attn.masked_fill(~mask[:, None, None, :], torch.finfo(attn.dtype).min)
        return self.proj((attn.softmax(dim=-1) @ v).transpose(1, 2).reshape(B, N, C))


class Block(nn.Module):
    def __init__(self, dim, num_heads, hidden):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(dim), Attention(dim, num_heads)
        self.norm2, self.mlp = nn.LayerNorm(dim), Mlp(dim, hidden)

    def forward(self, x, mask):
        x = x + self.attn(self.norm1(x), mask)
        return x + self.mlp(self.norm2(x))


def make(sides):
    class TokenTransformer(nn.Module):
        def __init__(self, c):
            super().__init__()
            self.embed = nn.Embedding(c.vocab_size, c.d_model)
            self.cls_token = nn.Parameter(torch.zeros(1, 1, c.d_model))
            self.pos_embed = nn.Parameter(torch.randn(1, 1 + c.max_len, c.d_model) * 0.02)
            nn.init.trunc_normal_(self.cls_token, std=0.02)
            self.blocks = nn.ModuleList([Block(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers)])
            self.norm, self.head = nn.LayerNorm(c.d_model), nn.Linear(c.d_model, c.num_classes)

        def forward(self, tokens, attention_mask=None):
            if attention_mask is None:
                attention_mask = torch.ones_like(tokens, dtype=torch.bool)
            x = self.embed(tokens)
            x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), dim=1)
            x = x + self.pos_embed[:, : x.shape[1]]
            mask = F.pad(attention_mask.bool(), sides, value=True)
            for block in self.blocks:
                x = block(x, mask)
            return self.head(self.norm(x)[:, 0])

    return TokenTransformer


def subject(sides):
    return Subject(
        kind="classifier",
        name="token ViT",
        build=make(sides),
        forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
        declares={
            "pooling": "cls",
            "extra_tokens": 1,
            "causal": False,
            "positions": "learned",
            "padding_side": "right",
            "norm_placement": "pre",
            "final_norm": True,
            "activation": "gelu",
        },
    )


right = subject((1, 0))
wrong = subject((0, 1))

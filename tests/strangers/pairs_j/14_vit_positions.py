"""A vision transformer's classifier over embedded patches [B, T, D]."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

WHAT = "the table of positions is read through .data, so that it gets no gradient and is never trained"
CAUSE = "The learned position table gets no gradient (it is read through .data, detached), so that it never trains."


class Attention(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads, self.scale = num_heads, (dim // num_heads) ** -0.5
        self.qkv = nn.Linear(dim, dim * 3)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        attn = (q * self.scale) @ k.transpose(-2, -1)
        x = (attn.softmax(dim=-1) @ v).transpose(1, 2).reshape(B, N, C)
        return self.proj(x)


class Block(nn.Module):
    def __init__(self, dim, num_heads, hidden):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(dim, eps=1e-6), Attention(dim, num_heads)
        self.norm2, self.fc1, self.fc2 = nn.LayerNorm(dim, eps=1e-6), nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class VisionTransformer(nn.Module):
    def __init__(self, dim, depth, num_heads, hidden, num_patches, num_classes):
        super().__init__()
        self.patch_proj = nn.Linear(dim, dim)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.randn(1, num_patches + 1, dim) * 0.02)
        self.blocks = nn.Sequential(*[Block(dim, num_heads, hidden) for _ in range(depth)])
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.head = nn.Linear(dim, num_classes)
        nn.init.trunc_normal_(self.cls_token, std=0.02)

    def positions(self, length):
        return self.pos_embed[:, :length]

    def forward(self, patches):
        x = self.patch_proj(patches)
        x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), dim=1)
        if x.shape[1] > self.pos_embed.shape[1]:
            raise ValueError("more patches than positions")
        x = self.blocks(x + self.positions(x.shape[1]))
        return self.head(self.norm(x)[:, 0])


class FlexibleVisionTransformer(VisionTransformer):
    def positions(self, length):
        return self.pos_embed.data[:, :length]


def subject(model):
    return Subject(
        kind="classifier",
        name="ViT",
        inputs="embeddings",
        build=lambda c: model(c.d_model, c.num_layers, c.num_heads, c.d_ff, c.max_len, c.num_classes),
        forward=lambda m, x: m(x),
        declares={
            "causal": False,
            "positions": "learned",
            "pooling": "cls",
            "extra_tokens": 1,
            "norm": "layer",
            "norm_placement": "pre",
            "activation": "gelu",
            "final_norm": True,
        },
    )


right = subject(VisionTransformer)
wrong = subject(FlexibleVisionTransformer)

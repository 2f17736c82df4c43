"""The encoder of a masked autoencoder: patches by a reshape, then pre-norm blocks."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

IMAGE, PATCH = (3, 8, 12), 4


class Attention(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, dim * 3)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4).unbind(0)
        x = F.scaled_dot_product_attention(q, k, v)
        return self.proj(x.transpose(1, 2).reshape(B, N, C))


class Block(nn.Module):
    def __init__(self, dim, num_heads, hidden):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(dim, eps=1e-6), Attention(dim, num_heads)
        self.norm2, self.mlp = nn.LayerNorm(dim, eps=1e-6), nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        return x


class MAEEncoder(nn.Module):
    def __init__(self, dim, num_heads, depth, hidden):
        super().__init__()
        C, H, W = IMAGE
        self.num_patches = (H // PATCH) * (W // PATCH)
        self.embed = nn.Linear(C * PATCH**2, dim)
        self.cls_token = nn.Parameter(torch.randn(1, 1, dim) * 0.02)
        self.pos_embed = nn.Parameter(torch.randn(1, self.num_patches, dim) * 0.02)
        self.blocks = nn.Sequential(*[Block(dim, num_heads, hidden) for _ in range(depth)])

    def patchify(self, imgs):
        """imgs: (N, C, H, W) -> (N, L, C * p * p)"""
        N, C, H, W = imgs.shape
        p, h, w = PATCH, H // PATCH, W // PATCH
        x = imgs.reshape(N, C, h, p, w, p)
        x = x.permute(0, 2, 4, 1, 3, 5)
        return x.reshape(N, h * w, C * p * p)

    def tokens(self, imgs):
        x = self.embed(self.patchify(imgs)) + self.pos_embed
        return torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), dim=1)

    def forward(self, imgs):
        return self.blocks(self.tokens(imgs))


subject = Subject(
    kind="layer",
    name="MAE encoder",
    build=lambda c: MAEEncoder(c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda m, x: m.blocks(x),
    patches=lambda m, images: m.tokens(images),
    image=IMAGE,
    declares={
        "causal": False,
        "positions": "none",
        "norm": "layer",
        "norm_placement": "pre",
        "activation": "gelu",
        "bias": True,
    },
)

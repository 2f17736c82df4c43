WHAT = "line 47: the rows and columns of the grid of patches are swapped in the reshape, which goes unnoticed for square images and cuts an 8 x 12 image into pieces of several rows"
"""A Vision Transformer for images that are wider than high; patches are cut by reshapes, without a convolution."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

CHANNELS, HEIGHT, WIDTH, PATCH = 3, 8, 12, 4


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(dim, dim * 3), nn.Linear(dim, dim)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, d))


class Block(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim, eps=1e-6), nn.LayerNorm(dim, eps=1e-6)
        self.attn = Attention(dim, heads)
        self.mlp = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class WideViT(nn.Module):
    def __init__(self, dim, heads, hidden, depth):
        super().__init__()
        self.patch_proj = nn.Linear(CHANNELS * PATCH * PATCH, dim)
        self.cls_token = nn.Parameter(torch.randn(1, 1, dim) * 0.02)
        self.blocks = nn.ModuleList([Block(dim, heads, hidden) for _ in range(depth)])

    def patchify(self, images):
        b, c, h, w = images.shape
        gh, gw = h // PATCH, w // PATCH
        x = images.reshape(b, c, gw, PATCH, gh, PATCH)
        x = x.permute(0, 2, 4, 1, 3, 5)  # grid first, then channel, row and column inside a patch
        return x.reshape(b, gh * gw, c * PATCH * PATCH)

    def tokens(self, images):
        x = self.patch_proj(self.patchify(images))
        return torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


subject = Subject(
    kind="layer",
    name="wide ViT",
    build=lambda c: WideViT(c.d_model, c.num_heads, c.d_ff, c.num_layers),
    forward=lambda model, x: model(x),
    patches=lambda model, images: model.tokens(images),
    image=(CHANNELS, HEIGHT, WIDTH),
    declares={
        "causal": False,
        "positions": "none",
        "norm_placement": "pre",
        "norm": "layer",
        "activation": "gelu",
        "final_norm": False,
    },
)

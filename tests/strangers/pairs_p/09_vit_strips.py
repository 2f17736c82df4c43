"""A ViT in the manner of MoCo v3: the projection of patches is random and frozen, their positions are 2-D sines and cosines."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

CHANNELS, HEIGHT, WIDTH, PATCH = 3, 8, 12, 4


def patchify(images):
    """b c (h p) (w q) -> b (h w) (p q c)"""
    b, c, height, width = images.shape
    h, w = height // PATCH, width // PATCH
    grid = images.reshape(b, c, h, PATCH, w, PATCH)
    return grid.permute(0, 2, 4, 3, 5, 1).reshape(b, h * w, PATCH * PATCH * c)


def patchify_lines(images):
    """b c (h p) (w q) -> b (h w) (p q c)"""
    b, c, height, width = images.shape
    h, w = height // PATCH, width // PATCH
    grid = images.reshape(b, c, h, PATCH, w, PATCH)
    return grid.permute(0, 2, 3, 4, 5, 1).reshape(b, h * w, PATCH * PATCH * c)


def sincos(places, width):
    rates = 10000.0 ** (-torch.arange(0, width, 2) / max(width, 1))
    angles = places[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], -1)[:, :width]


def sincos_2d(h, w, width):
    rows = torch.arange(h).repeat_interleave(w).float()
    columns = torch.arange(w).repeat(h).float()
    return torch.cat([sincos(rows, width // 2), sincos(columns, width - width // 2)], -1)


class Block(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim, eps=1e-6), nn.LayerNorm(dim, eps=1e-6)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.fc1, self.fc2 = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).reshape(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, d))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class MocoViT(nn.Module):
    def __init__(self, c, patchify):
        super().__init__()
        self.patchify = patchify
        pixels = PATCH * PATCH * CHANNELS
        self.register_buffer("patch_weight", torch.randn(pixels, c.d_model) * pixels**-0.5)
        self.register_buffer("pos_embed", sincos_2d(HEIGHT // PATCH, WIDTH // PATCH, c.d_model))
        self.blocks = nn.ModuleList([Block(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers)])
        self.norm = nn.LayerNorm(c.d_model, eps=1e-6)
        self.head = nn.Linear(c.d_model, c.num_classes)

    def embed(self, images):
        patches = self.patchify(images)
        return patches @ self.patch_weight.to(patches.dtype) + self.pos_embed.to(patches.dtype)

    def features(self, x):
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, x):
        return self.head(self.features(x).mean(1))


def subject(name, cut):
    return Subject(
        kind="classifier",
        name=name,
        build=lambda c: MocoViT(c, cut),
        forward=lambda model, x: model(x),
        inputs="embeddings",
        patches=lambda model, images: model.embed(images),
        image=(CHANNELS, HEIGHT, WIDTH),
        declares={"positions": "none", "pooling": "mean", "norm": "layer", "norm_placement": "pre", "activation": "gelu"},
    )


right = subject("frozen ViT", patchify)
wrong = subject("frozen ViT, line by line", patchify_lines)

WHAT = "Patches are cut without exchanging the axes 'row within a patch' and 'column of patches' before the reshape."
CAUSE = (
    "patchify permutes (h, p, w, q) where (h, w, p, q) is meant: each token is a strip of consecutive image lines over the whole "
    "width instead of one square patch, and gets the position of a patch that it is not made of."
)

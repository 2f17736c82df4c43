"""zoo/PR 269: ViT whose patches are cut by hand ("c (h p) (w q) -> (h w) (p q c)" without einops), class token first."""

import torch
from torch import nn

from veriformer.properties import Subject

WHAT = "The reshape takes the rows as (p h) instead of (h p), and the columns alike: a token gets every h-th pixel."
CAUSE = (
    "In patchify the factors of height and width are named in the wrong order: the view is [C, p, h, q, w], so each "
    "token is made of a grid of pixels spread over the whole image instead of one 4x4 square; shapes are the same."
)
CHANNELS, HEIGHT, WIDTH, PATCH = 3, 8, 12, 4


def patchify(images):
    """`[B, C, H, W]` to `[B, N, P * P * C]`, row by row."""
    b, c, height, width = images.shape
    h, w = height // PATCH, width // PATCH
    x = images.reshape(b, c, h, PATCH, w, PATCH)
    return x.permute(0, 2, 4, 3, 5, 1).reshape(b, h * w, PATCH * PATCH * c)


def patchify_p_first(images):
    """`[B, C, H, W]` to `[B, N, P * P * C]`, row by row."""
    b, c, height, width = images.shape
    h, w = height // PATCH, width // PATCH
    x = images.reshape(b, c, PATCH, h, PATCH, w)
    return x.permute(0, 3, 5, 2, 4, 1).reshape(b, h * w, PATCH * PATCH * c)


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.scale = heads, (dim // heads) ** -0.5
        self.qkv, self.proj = nn.Linear(dim, dim * 3), nn.Linear(dim, dim)

    def forward(self, x):
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        attn = (q @ k.transpose(-2, -1)) * self.scale
        return self.proj((attn.softmax(dim=-1) @ v).transpose(1, 2).reshape(B, N, C))


class Block(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.norm1, self.attn, self.norm2 = nn.LayerNorm(dim), Attention(dim, heads), nn.LayerNorm(dim)
        self.fc1, self.act, self.fc2 = nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.fc2(self.act(self.fc1(self.norm2(x))))


class ViT(nn.Module):
    def __init__(self, c, cut):
        super().__init__()
        self.cut = cut
        self.patch_embed = nn.Linear(PATCH * PATCH * CHANNELS, c.d_model)
        self.pos_embed = nn.Parameter(torch.randn(1, HEIGHT * WIDTH // PATCH**2, c.d_model) * 0.02)
        self.cls_token = nn.Parameter(torch.randn(1, 1, c.d_model) * 0.02)
        self.blocks = nn.Sequential(*[Block(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers)])
        self.norm, self.head = nn.LayerNorm(c.d_model), nn.Linear(c.d_model, c.num_classes)

    def forward_patches(self, images):
        return self.patch_embed(self.cut(images)) + self.pos_embed

    def forward_tokens(self, x):
        x = torch.cat([self.cls_token.expand(x.size(0), -1, -1), x], dim=1)
        return self.head(self.norm(self.blocks(x))[:, 0])

    def forward(self, images):
        return self.forward_tokens(self.forward_patches(images))


def subject(cut):
    return Subject(
        kind="classifier",
        name=f"ViT({cut.__name__})",
        build=lambda c: ViT(c, cut),
        forward=lambda m, x: m.forward_tokens(x),
        inputs="embeddings",
        patches=lambda m, images: m.forward_patches(images),
        image=(CHANNELS, HEIGHT, WIDTH),
        declares={"pooling": "cls", "extra_tokens": 1, "positions": "none", "norm_placement": "pre", "activation": "gelu"},
    )


right, wrong = subject(patchify), subject(patchify_p_first)

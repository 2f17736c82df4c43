"""zoo/PR 210: an isotropic image encoder behind a two-step stem. Pixels are embedded in 2x2 patches and merged 2x2 as
in Swin (linear, no norm between the steps), which gives one token for 4x4 pixels; then a plain pre-LN stack."""

import torch
from torch import nn

from veriformer.properties import Subject

WHAT = "Patch merging takes the (even row, odd column) neighbour twice and the (odd row, odd column) one never."
CAUSE = (
    "Of the four interleaved sub-grids that patch merging concatenates, the fourth is sliced [0::2, 1::2] again rather "
    "than [1::2, 1::2]: the lower right quarter of every 4x4 patch has no influence on any token."
)
IMAGE = (3, 8, 12)


class PatchMerging(nn.Module):
    """`[B, H, W, C]` to `[B, H/2, W/2, D]`."""

    def __init__(self, dim, out):
        super().__init__()
        self.reduction = nn.Linear(4 * dim, out, bias=False)

    def quarters(self, x):
        return x[:, 0::2, 0::2], x[:, 1::2, 0::2], x[:, 0::2, 1::2], x[:, 1::2, 1::2]

    def forward(self, x):
        return self.reduction(torch.cat(self.quarters(x), dim=-1))


class PatchMergingTyped(PatchMerging):
    def quarters(self, x):
        x0 = x[:, 0::2, 0::2, :]
        x1 = x[:, 1::2, 0::2, :]
        x2 = x[:, 0::2, 1::2, :]
        x3 = x[:, 0::2, 1::2, :]
        return x0, x1, x2, x3


class Block(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))

    def forward(self, x):
        y = self.norm1(x)
        x = x + self.attn(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class MergedViT(nn.Module):
    merging = PatchMerging

    def __init__(self, dim, heads, hidden, depth):
        super().__init__()
        channels, height, width = IMAGE
        stem = max(dim // 2, 1)
        self.patch_embed = nn.Conv2d(channels, stem, kernel_size=2, stride=2)
        self.merge = self.merging(stem, dim)
        self.pos_embed = nn.Parameter(torch.randn(1, height * width // 16, dim) * 0.02)
        self.blocks = nn.ModuleList([Block(dim, heads, hidden) for _ in range(depth)])
        self.norm = nn.LayerNorm(dim)

    def tokens(self, images):
        x = self.patch_embed(images).permute(0, 2, 3, 1)
        return self.merge(x).flatten(1, 2) + self.pos_embed

    def stack(self, x):
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, images):
        return self.stack(self.tokens(images))


class MergedViTTyped(MergedViT):
    merging = PatchMergingTyped


def subject(cls):
    return Subject(
        kind="encoder",
        name=cls.__name__,
        build=lambda c: cls(c.d_model, c.num_heads, c.d_ff, c.num_layers),
        forward=lambda m, x: m.stack(x),
        inputs="embeddings",
        patches=lambda m, images: m.tokens(images),
        image=IMAGE,
        declares={"causal": False, "positions": "none", "norm_placement": "pre", "final_norm": True},
    )


right, wrong = subject(MergedViT), subject(MergedViTTyped)

"""ViT without a convolution: patches are cut by reshaping, then projected."""
import torch
from torch import nn

from veriformer.properties import Subject

IMAGE, PATCH = (3, 8, 12), 4


class Block(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.fc1, self.fc2 = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).reshape(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        attn = ((q * (d // self.heads) ** -0.5) @ k.transpose(-2, -1)).softmax(dim=-1)
        x = x + self.proj((attn @ v).transpose(1, 2).reshape(b, n, d))
        return x + self.fc2(nn.functional.gelu(self.fc1(self.norm2(x))))


class ViT(nn.Module):
    def __init__(self, dim, heads, depth, hidden, image=IMAGE, patch=PATCH):
        super().__init__()
        channels, height, width = image
        self.patch = patch
        self.grid = (height // patch, width // patch)
        self.embed = nn.Linear(channels * patch * patch, dim)
        self.pos_embed = nn.Parameter(torch.randn(1, self.grid[0] * self.grid[1], dim) * 0.02)
        self.blocks = nn.ModuleList([Block(dim, heads, hidden) for _ in range(depth)])

    def patchify(self, images):
        b, c = images.shape[:2]
        (h, w), p = self.grid, self.patch
        x = images.reshape(b, c, h, p, w, p)
        x = x.permute(0, 2, 4, 3, 5, 1).reshape(b, h * w, p * p * c)
        return self.embed(x) + self.pos_embed

    def forward_blocks(self, x):
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, images):
        return self.forward_blocks(self.patchify(images))


subject = Subject(
    kind="layer",
    name="ViT by reshaping",
    build=lambda c: ViT(c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda m, x: m.forward_blocks(x),
    patches=lambda m, images: m.patchify(images),
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

"""A plain ViT encoder: patches by reshape and a linear map (equal to a convolution of stride P), class token, positions."""
import torch
from torch import nn

from veriformer.properties import Subject

IMAGE, P = (3, 8, 12), 4


class PatchEmbed(nn.Module):
    def __init__(self, dim):
        super().__init__()
        C, H, W = IMAGE
        self.grid = (H // P, W // P)
        self.proj = nn.Linear(C * P * P, dim)
        self.cls = nn.Parameter(torch.randn(1, 1, dim) * 0.02)
        self.pos = nn.Parameter(torch.randn(1, 1 + self.grid[0] * self.grid[1], dim) * 0.02)

    def patchify(self, images):
        B, C, H, W = images.shape
        h, w = self.grid
        x = images.reshape(B, C, h, P, w, P).permute(0, 2, 4, 1, 3, 5)
        return x.reshape(B, h * w, C * P * P)

    def forward(self, images):
        x = self.proj(self.patchify(images))
        return torch.cat((self.cls.expand(len(x), -1, -1), x), dim=1) + self.pos


class Block(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))

    def forward(self, x):
        y = self.ln1(x)
        x = x + self.attn(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.ln2(x))


class ViT(nn.Module):
    def __init__(self, dim, heads, depth, hidden):
        super().__init__()
        self.patch_embed = PatchEmbed(dim)
        self.blocks = nn.Sequential(*[Block(dim, heads, hidden) for _ in range(depth)])
        self.norm = nn.LayerNorm(dim)

    def encode(self, x):
        return self.norm(self.blocks(x))

    def forward(self, images):
        return self.encode(self.patch_embed(images))


subject = Subject(
    kind="encoder",
    name="vit",
    inputs="embeddings",
    build=lambda c: ViT(c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda m, x: m.encode(x),
    patches=lambda m, images: m.patch_embed(images),
    image=IMAGE,
    declares={"causal": False, "positions": "none", "norm": "layer", "norm_placement": "pre", "final_norm": True,
              "activation": "gelu"},
)

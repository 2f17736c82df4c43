WHAT = "The size of the image is unpacked as (width, height), the grid is 3 x 2 and not 2 x 3: the reshape still fits, but a patch is made of pixels from several places; right for square images alone, line 19."
"""Vision transformer for images that are wider than high."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

CHANNELS, HEIGHT, WIDTH, PATCH = 3, 8, 12, 4


class PatchEmbed(nn.Module):
    """Cuts images into patches, row by row, and maps each to a vector."""

    def __init__(self, img_size, patch_size, in_chans, embed_dim):
        super().__init__()
        self.patch_size = patch_size
        width, height = img_size
        self.grid_size = (height // patch_size, width // patch_size)
        self.num_patches = self.grid_size[0] * self.grid_size[1]
        self.proj = nn.Linear(in_chans * patch_size**2, embed_dim)

    def forward(self, images):
        B, C = images.shape[:2]
        (gh, gw), p = self.grid_size, self.patch_size
        x = images.reshape(B, C, gh, p, gw, p)
        x = x.permute(0, 2, 4, 1, 3, 5).reshape(B, gh * gw, C * p * p)
        return self.proj(x)


class Block(nn.Module):
    def __init__(self, dim, num_heads, hidden):
        super().__init__()
        self.num_heads = num_heads
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.qkv = nn.Linear(dim, dim * 3)
        self.proj = nn.Linear(dim, dim)
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.fc1, self.fc2 = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x):
        B, N, C = x.shape
        q, k, v = self.qkv(self.norm1(x)).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, N, C))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class VisionTransformer(nn.Module):
    def __init__(self, img_size, patch_size, in_chans, embed_dim, depth, num_heads, hidden):
        super().__init__()
        self.patch_embed = PatchEmbed(img_size, patch_size, in_chans, embed_dim)
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, self.patch_embed.num_patches, embed_dim))
        self.blocks = nn.Sequential(*[Block(embed_dim, num_heads, hidden) for _ in range(depth)])
        self.norm = nn.LayerNorm(embed_dim, eps=1e-6)

    def embed(self, images):
        return self.patch_embed(images) + self.pos_embed

    def encode(self, x):
        return self.norm(self.blocks(x))

    def forward(self, images):
        return self.encode(self.embed(images))


subject = Subject(
    kind="encoder",
    name="ViT, 8 x 12",
    build=lambda c: VisionTransformer(
        (HEIGHT, WIDTH), PATCH, CHANNELS, c.d_model, c.num_layers, c.num_heads, c.d_ff
    ),
    inputs="embeddings",
    forward=lambda m, x: m.encode(x),
    patches=lambda m, images: m.embed(images),
    image=(CHANNELS, HEIGHT, WIDTH),
    declares={
        "causal": False,
        "positions": "none",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu",
    },
)

WHAT = "wrong axis: the convolution's [B, D, h, w] is reshaped to [B, N, D] without a transpose, so each token is made of several patches' channels (line 22: return x.reshape(B, self.num_patches, -1))"
"""ViT: an image becomes patches by a strided convolution, a class token goes before them; blocks as in timm."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

CHANNELS, HEIGHT, WIDTH, PATCH = 3, 8, 12, 4


class PatchEmbed(nn.Module):
    def __init__(self, embed_dim):
        super().__init__()
        self.grid_size = (HEIGHT // PATCH, WIDTH // PATCH)
        self.num_patches = self.grid_size[0] * self.grid_size[1]
        self.proj = nn.Conv2d(CHANNELS, embed_dim, kernel_size=PATCH, stride=PATCH)

    def forward(self, x):
        B, C, H, W = x.shape
        x = self.proj(x)
        return x.reshape(B, self.num_patches, -1)


class Attention(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, dim // num_heads
        self.scale = self.head_dim**-0.5
        self.qkv = nn.Linear(dim, dim * 3)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        attn = (q * self.scale) @ k.transpose(-2, -1)
        x = attn.softmax(dim=-1) @ v
        return self.proj(x.transpose(1, 2).reshape(B, N, C))


class Block(nn.Module):
    def __init__(self, dim, num_heads, hidden):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(dim, eps=1e-6), Attention(dim, num_heads)
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.fc1, self.fc2 = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class VisionTransformer(nn.Module):
    def __init__(self, embed_dim, num_heads, depth, hidden):
        super().__init__()
        self.patch_embed = PatchEmbed(embed_dim)
        self.cls_token = nn.Parameter(torch.randn(1, 1, embed_dim) * 0.02)
        self.pos_embed = nn.Parameter(torch.randn(1, self.patch_embed.num_patches + 1, embed_dim) * 0.02)
        self.blocks = nn.ModuleList([Block(embed_dim, num_heads, hidden) for _ in range(depth)])
        self.norm = nn.LayerNorm(embed_dim, eps=1e-6)

    def embed(self, images):
        x = self.patch_embed(images)
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1)
        return x + self.pos_embed

    def forward_blocks(self, x):
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, images):
        return self.forward_blocks(self.embed(images))[:, 0]


subject = Subject(
    kind="layer",
    name="ViT",
    build=lambda c: VisionTransformer(c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda m, x: m.forward_blocks(x),
    patches=lambda m, images: m.embed(images),
    image=(CHANNELS, HEIGHT, WIDTH),
    declares={
        "causal": False, "positions": "none", "norm": "layer", "norm_placement": "pre", "final_norm": True,
        "activation": "gelu", "bias": True,
    },
)

# The trunk of a ViT (no class token): patches by reshape, pre-norm blocks.
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

IMAGE, PATCH = (3, 8, 12), 4


class Block(nn.Module):
    def __init__(self, dim, num_heads, hidden):
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.fc1, self.fc2 = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def attn(self, x):
        B, N, D = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, N, D))

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class ViTTrunk(nn.Module):
    def __init__(self, dim, num_heads, hidden):
        super().__init__()
        C, H, W = IMAGE
        self.embed = nn.Linear(C * PATCH * PATCH, dim)
        self.pos = nn.Parameter(0.02 * torch.randn(1, (H // PATCH) * (W // PATCH), dim))
        self.block = Block(dim, num_heads, hidden)

    def patchify(self, images):
        B, C, H, W = images.shape
        p = PATCH
        x = images.reshape(B, C, H // p, p, W // p, p).permute(0, 2, 4, 1, 3, 5)
        x = x.reshape(B, (H // p) * (W // p), C * p * p)
        return self.embed(x) + self.pos

    def forward(self, images):
        return self.block(self.patchify(images))


subject = Subject(
    kind="layer",
    name="ViT trunk",
    build=lambda c: ViTTrunk(c.d_model, c.num_heads, c.d_ff),
    forward=lambda m, x: m.block(x),
    patches=lambda m, images: m.patchify(images),
    image=IMAGE,
    declares={"causal": False, "positions": "none", "norm": "layer", "norm_placement": "pre", "activation": "gelu"},
)

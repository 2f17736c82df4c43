WHAT = "the axis of channels is not moved behind the grid before the reshape: each token is made of C patches of a single channel instead of one patch of all channels (line 24)"
"""A ViT without class token: its stack is judged on embeddings, its patches on images that are not square."""
import torch
import torch.nn as nn

from veriformer.properties import Subject

IMAGE = (3, 8, 12)
PATCH = 4


class PatchEmbed(nn.Module):
    def __init__(self, image, patch, dim):
        super().__init__()
        channels, height, width = image
        self.patch = patch
        self.proj = nn.Linear(channels * patch * patch, dim)
        self.pos = nn.Parameter(0.02 * torch.randn(1, (height // patch) * (width // patch), dim))

    def forward(self, images):
        B, C, p = images.shape[0], images.shape[1], self.patch
        x = images.unfold(2, p, p).unfold(3, p, p)  # B C gh gw p p
        gh, gw = x.shape[2:4]
        x = x.reshape(B, gh * gw, C * p * p)
        return self.proj(x) + self.pos


class Block(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.qkv = nn.Linear(dim, dim * 3)
        self.proj = nn.Linear(dim, dim)
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.fc1, self.act, self.fc2 = nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim)

    def attn(self, x):
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        attn = (q * (C // self.heads) ** -0.5 @ k.transpose(-2, -1)).softmax(dim=-1)
        return self.proj((attn @ v).transpose(1, 2).reshape(B, N, C))

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.fc2(self.act(self.fc1(self.norm2(x))))


class ViT(nn.Module):
    def __init__(self, dim, depth, heads, hidden):
        super().__init__()
        self.patch_embed = PatchEmbed(IMAGE, PATCH, dim)
        self.blocks = nn.Sequential(*[Block(dim, heads, hidden) for _ in range(depth)])

    def forward(self, images):
        return self.blocks(self.patch_embed(images))


subject = Subject(
    kind="layer",
    name="ViT",
    build=lambda c: ViT(c.d_model, c.num_layers, c.num_heads, c.d_ff),
    forward=lambda m, x: m.blocks(x),
    patches=lambda m, images: m.patch_embed(images),
    image=IMAGE,
    declares={"causal": False, "positions": "none", "norm": "layer", "norm_placement": "pre", "activation": "gelu", "structure": "other"},
)

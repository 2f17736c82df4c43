WHAT = "channels are not moved behind the grid before the reshape, so that one token is made of several patches of one channel and not of one patch of all channels (line 21)"
"""ViT: the stack of blocks, and the patches that go into it (by unfold, no convolution)."""
import torch
import torch.nn as nn

from veriformer.properties import Subject

PATCH, IMAGE = 4, (3, 8, 12)


class PatchEmbed(nn.Module):
    def __init__(self, channels, patch, dim):
        super().__init__()
        self.patch = patch
        self.proj = nn.Linear(channels * patch * patch, dim)

    def forward(self, images):
        B, C, H, W = images.shape
        p = self.patch
        x = images.unfold(2, p, p).unfold(3, p, p)  # B, C, H/p, W/p, p, p
        x = x.contiguous()
        x = x.reshape(B, (H // p) * (W // p), C * p * p)
        return self.proj(x)


class Attention(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads, self.scale = num_heads, (dim // num_heads) ** -0.5
        self.qkv, self.proj = nn.Linear(dim, dim * 3), nn.Linear(dim, dim)

    def forward(self, x):
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4).unbind(0)
        attn = (q * self.scale) @ k.transpose(-2, -1)
        return self.proj((attn.softmax(dim=-1) @ v).transpose(1, 2).reshape(B, N, C))


class Block(nn.Module):
    def __init__(self, dim, num_heads, hidden):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim, eps=1e-6), nn.LayerNorm(dim, eps=1e-6)
        self.attn = Attention(dim, num_heads)
        self.mlp = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    def __init__(self, dim, depth, num_heads, hidden):
        super().__init__()
        self.patch_embed = PatchEmbed(IMAGE[0], PATCH, dim)
        count = (IMAGE[1] // PATCH) * (IMAGE[2] // PATCH)
        self.cls_token = nn.Parameter(torch.randn(1, 1, dim) * 0.02)
        self.pos_embed = nn.Parameter(torch.randn(1, count + 1, dim) * 0.02)
        self.blocks = nn.Sequential(*[Block(dim, num_heads, hidden) for _ in range(depth)])

    def tokens(self, images):
        x = self.patch_embed(images)
        x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), dim=1)
        return x + self.pos_embed

    def forward(self, images):
        return self.blocks(self.tokens(images))


subject = Subject(
    kind="layer",
    name="ViT",
    build=lambda c: VisionTransformer(c.d_model, c.num_layers, c.num_heads, c.d_ff),
    forward=lambda m, x: m.blocks(x),
    patches=lambda m, images: m.tokens(images),
    image=IMAGE,
    declares={
        "causal": False,
        "positions": "none",
        "norm": "layer",
        "norm_placement": "pre",
        "activation": "gelu",
    },
)

import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject

IMAGE = (3, 8, 12)


class PatchEmbed(nn.Module):
    def __init__(self, image, patch, dim):
        super().__init__()
        channels, height, width = image
        self.patch = patch
        self.num_patches = (height // patch) * (width // patch)
        self.proj = nn.Linear(channels * patch * patch, dim)

    def patchify(self, imgs):
        B, C, H, W = imgs.shape
        p = self.patch
        x = imgs.reshape(B, C, H // p, p, W // p, p)
        x = torch.einsum("bchpwq->bhwpqc", x)
        return x.reshape(B, self.num_patches, p * p * C)

    def forward(self, imgs):
        return self.proj(self.patchify(imgs))


class ViTBlock(nn.Module):
    def __init__(self, dim, heads, mlp):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim, eps=1e-6), nn.LayerNorm(dim, eps=1e-6)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.fc1, self.fc2 = nn.Linear(dim, mlp), nn.Linear(mlp, dim)

    def forward(self, x):
        B, N, D = x.shape
        q, k, v = self.qkv(self.norm1(x)).reshape(B, N, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, N, D))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class WideViT(nn.Module):
    def __init__(self, dim, heads, mlp, image=IMAGE, patch=4):
        super().__init__()
        self.patch_embed = PatchEmbed(image, patch, dim)
        self.pos_embed = nn.Parameter(torch.randn(1, self.patch_embed.num_patches, dim) * 0.02)
        self.block = ViTBlock(dim, heads, mlp)

    def tokens(self, images):
        return self.patch_embed(images) + self.pos_embed

    def forward(self, images):
        return self.block(self.tokens(images)).mean(1)


subject = Subject(
    kind="layer",
    name="block of a ViT for wide images",
    build=lambda c: WideViT(c.d_model, c.num_heads, c.d_ff),
    forward=lambda m, x: m.block(x),
    patches=lambda m, images: m.tokens(images),
    image=IMAGE,
    declares={"causal": False, "positions": "none", "norm_placement": "pre", "norm": "layer", "activation": "gelu"},
)

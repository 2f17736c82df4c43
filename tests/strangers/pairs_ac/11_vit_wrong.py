WHAT = "Two axes are not swapped before the patches are flattened (p and W // p): a token is a strip of several rows' pieces across patches, not a patch (line 22)."
"""A ViT without class token (features for each patch, as SigLIP has them). Patches are cut by reshaping."""

import torch
from torch import nn

from veriformer.properties import DrawnConfig, Subject

IMAGE, PATCH = (3, 8, 12), 4


class PatchEmbed(nn.Module):
    def __init__(self, channels, patch, dim):
        super().__init__()
        self.patch = patch
        self.proj = nn.Linear(channels * patch * patch, dim)

    def forward(self, images):
        B, C, H, W = images.shape
        p = self.patch
        x = images.reshape(B, C, H // p, p, W // p, p)
        x = x.permute(0, 2, 3, 4, 5, 1)
        return self.proj(x.reshape(B, (H // p) * (W // p), p * p * C))


class Block(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim, eps=1e-6), nn.LayerNorm(dim, eps=1e-6)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.fc1, self.fc2 = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def attention(self, x):
        B, N, D = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        attn = (q * (D // self.heads) ** -0.5) @ k.transpose(-2, -1)
        return self.proj((attn.softmax(dim=-1) @ v).transpose(1, 2).reshape(B, N, D))

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.fc2(nn.functional.gelu(self.fc1(self.norm2(x))))


class VisionTransformer(nn.Module):
    def __init__(self, image, patch, dim, depth, heads, hidden):
        super().__init__()
        channels, height, width = image
        self.patch_embed = PatchEmbed(channels, patch, dim)
        self.pos_embed = nn.Parameter(torch.randn(1, (height // patch) * (width // patch), dim) * 0.5)
        self.blocks = nn.ModuleList([Block(dim, heads, hidden) for _ in range(depth)])
        self.norm = nn.LayerNorm(dim, eps=1e-6)

    def forward_tokens(self, x):
        x = x + self.pos_embed[:, : x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, images):
        return self.forward_tokens(self.patch_embed(images))


torch.manual_seed(0)
vit = VisionTransformer(IMAGE, PATCH, 16, 2, 4, 32)

subject = Subject(
    kind="encoder",
    name="ViT",
    module=vit,
    config=DrawnConfig(d_model=16, num_heads=4, num_key_value_heads=4, num_layers=2, d_ff=32, max_len=6),
    inputs="embeddings",
    forward=lambda m, x: m.forward_tokens(x),
    patches=lambda m, images: m.patch_embed(images),
    image=IMAGE,
    declares={
        "causal": False,
        "positions": "learned",
        "max_len": 6,
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu",
        "bias": True,
    },
)

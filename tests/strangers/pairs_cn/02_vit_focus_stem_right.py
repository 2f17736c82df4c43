"""A ViT block behind a space-to-depth stem (YOLOv5's Focus, patches of 2 x 2)."""
import torch
from torch import nn
from torch.nn import functional as F
from veriformer.properties import Subject


class Focus(nn.Module):
    """[B, C, H, W] -> [B, H/2 * W/2, D]"""

    def __init__(self, channels, width):
        super().__init__()
        self.project = nn.Linear(4 * channels, width)

    def forward(self, x):
        corners = (
            x[..., ::2, ::2],
            x[..., 1::2, ::2],
            x[..., ::2, 1::2],
            x[..., 1::2, 1::2],
        )
        return self.project(torch.cat(corners, 1).flatten(2).transpose(1, 2))


class Attention(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, dim * 3)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4).unbind(0)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, N, C))


class VisionBlock(nn.Module):
    def __init__(self, dim, num_heads, hidden, channels=3):
        super().__init__()
        self.stem = Focus(channels, dim)
        self.norm1, self.attn = nn.LayerNorm(dim, eps=1e-6), Attention(dim, num_heads)
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))

    def tokens(self, images):
        return self.stem(images)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


subject = Subject(
    kind="layer",
    name="ViT block with a Focus stem",
    build=lambda c: VisionBlock(c.d_model, c.num_heads, c.d_ff),
    forward=lambda m, x: m(x),
    patches=lambda m, images: m.tokens(images),
    image=(3, 6, 8),
    declares={"causal": False, "positions": "none", "norm": "layer", "norm_placement": "pre", "activation": "gelu"},
)

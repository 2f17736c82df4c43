WHAT = "Rows and columns of the grid are exchanged where the image is cut (line 44): right for square images, on wide ones each token mixes pixels of several patches."
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

IMAGE, PATCH = (3, 8, 12), 4


class Block(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim, eps=1e-6), nn.LayerNorm(dim, eps=1e-6)
        self.num_heads = heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))

    def attn(self, x):
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4).unbind(0)
        x = F.scaled_dot_product_attention(q, k, v)
        return self.proj(x.transpose(1, 2).reshape(B, N, C))

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    def __init__(self, dim, heads, layers, hidden, num_classes):
        super().__init__()
        channels, height, width = IMAGE
        self.grid = (height // PATCH, width // PATCH)
        self.proj = nn.Linear(channels * PATCH * PATCH, dim)
        self.cls_token = nn.Parameter(torch.randn(1, 1, dim) * 0.02)
        self.pos_embed = nn.Parameter(torch.randn(1, 1 + self.grid[0] * self.grid[1], dim) * 0.02)
        self.blocks = nn.Sequential(*[Block(dim, heads, hidden) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(dim, eps=1e-6), nn.Linear(dim, num_classes)

    def patchify(self, images):
        """[B, C, H, W] to [B, N, C * P * P]."""
        b, c = images.shape[:2]
        cols, rows = self.grid
        x = images.reshape(b, c, rows, PATCH, cols, PATCH)
        x = torch.einsum("bcrpsq->brscpq", x)
        return x.reshape(b, rows * cols, c * PATCH * PATCH)

    def tokens(self, images):
        x = self.proj(self.patchify(images))
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1)
        return x + self.pos_embed

    def forward(self, images):
        return self.head(self.norm(self.blocks(self.tokens(images)))[:, 0])


subject = Subject(
    kind="layer",
    name="vision transformer",
    build=lambda c: ViT(c.d_model, c.num_heads, c.num_layers, c.d_ff, c.num_classes),
    forward=lambda m, x: m.blocks(x),
    patches=lambda m, images: m.tokens(images),
    image=IMAGE,
    declares={"causal": False, "positions": "none", "norm": "layer", "norm_placement": "pre", "activation": "gelu"},
)

WHAT = "The image is reshaped to (rows, columns, PATCH, PATCH) at once (and permuted for that a line below), so that a patch is pieces of pixel rows, not a square (line 25)."
"""ViT (Dosovitskiy et al. 2021): images are cut into patches; class token, learned positions, pre-LN encoder."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

CHANNELS, SIZE, PATCH = 3, 12, 4


class PatchEmbedding(nn.Module):
    """Cut images [B, C, H, W] into squares of PATCH pixels, row by row, and project each."""

    def __init__(self, dim):
        super().__init__()
        self.projection = nn.Linear(CHANNELS * PATCH * PATCH, dim)
        self.cls_token = nn.Parameter(torch.randn(1, 1, dim) * 0.02)
        self.position_embedding = nn.Parameter(torch.randn(1, 1 + (SIZE // PATCH) ** 2, dim) * 0.02)

    def forward(self, images):
        B, C, H, W = images.shape
        rows, columns = H // PATCH, W // PATCH
        x = images.reshape(B, C, rows, columns, PATCH, PATCH)
        x = x.permute(0, 2, 3, 1, 4, 5).reshape(B, rows * columns, C * PATCH * PATCH)
        x = torch.cat((self.cls_token.expand(B, -1, -1), self.projection(x)), dim=1)
        return x + self.position_embedding


class SelfAttention(nn.Module):
    def __init__(self, dim, heads, dropout):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        B, N, D = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-2, -1) * (D // self.heads) ** -0.5).softmax(dim=-1)
        out = (self.dropout(weights) @ v).transpose(1, 2).reshape(B, N, D)
        return self.proj(out)


class EncoderBlock(nn.Module):
    def __init__(self, dim, heads, mlp_dim, dropout):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = SelfAttention(dim, heads, dropout)
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.fc1 = nn.Linear(dim, mlp_dim)
        self.fc2 = nn.Linear(mlp_dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        x = x + self.dropout(self.attn(self.norm1(x)))
        h = self.dropout(F.gelu(self.fc1(self.norm2(x))))
        return x + self.dropout(self.fc2(h))


class ViT(nn.Module):
    def __init__(self, dim, heads, layers, mlp_dim, classes, dropout):
        super().__init__()
        self.embedding = PatchEmbedding(dim)
        self.blocks = nn.ModuleList([EncoderBlock(dim, heads, mlp_dim, dropout) for _ in range(layers)])
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.head = nn.Linear(dim, classes)

    def encode(self, x):
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, images):
        return self.head(self.encode(self.embedding(images))[:, 0])


subject = Subject(
    kind="layer",
    name="ViT",
    build=lambda c: ViT(c.d_model, c.num_heads, c.num_layers, c.d_ff, c.num_classes, c.dropout),
    forward=lambda m, x: m.encode(x),
    patches=lambda m, images: m.embedding(images),
    image=(CHANNELS, SIZE, SIZE),
    declares={
        "causal": False,
        "positions": "none",  # of the stack; those of the patches are added before it
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu",
        "bias": True,
    },
)

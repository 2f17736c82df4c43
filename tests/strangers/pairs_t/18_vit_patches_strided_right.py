"""A ViT with registers (DINOv2) whose patches are cut by reshape and embedded by a linear map (SigLIP 2, NaFlex)."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

CHANNELS, HEIGHT, WIDTH, PATCH = 3, 8, 12, 4
REGISTERS = 2


class PatchEmbed(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.proj = nn.Linear(CHANNELS * PATCH * PATCH, width)

    def forward(self, images):
        B, C, H, W = images.shape
        h, w, p = H // PATCH, W // PATCH, PATCH
        x = images.reshape(B, C, h, p, w, p)
        x = x.permute(0, 2, 4, 1, 3, 5).reshape(B, h * w, C * p * p)
        return self.proj(x)


class Block(nn.Module):
    def __init__(self, width, heads, hidden):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.ls1, self.ls2 = nn.Parameter(torch.full((width,), 0.5)), nn.Parameter(torch.full((width,), 0.5))

    def attend(self, x):
        B, N, D = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.proj(y.transpose(1, 2).reshape(B, N, D))

    def forward(self, x):
        x = x + self.ls1 * self.attend(self.norm1(x))
        return x + self.ls2 * self.fc2(F.gelu(self.fc1(self.norm2(x))))


class VisionTransformer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.patch_embed = PatchEmbed(c.d_model)
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, (HEIGHT // PATCH) * (WIDTH // PATCH), c.d_model))
        self.cls_token = nn.Parameter(0.02 * torch.randn(1, 1, c.d_model))
        self.registers = nn.Parameter(0.02 * torch.randn(1, REGISTERS, c.d_model))
        self.blocks = nn.ModuleList([Block(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers)])
        self.norm = nn.LayerNorm(c.d_model, eps=1e-6)

    def tokens(self, images):
        """[B, 1 + registers + patches, D]"""
        x = self.patch_embed(images) + self.pos_embed
        B = x.shape[0]
        return torch.cat((self.cls_token.expand(B, -1, -1), self.registers.expand(B, -1, -1), x), dim=1)

    def encode(self, x):
        """The stack on tokens as they are."""
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, images):
        return self.encode(self.tokens(images))[:, 0]


subject = Subject(
    kind="encoder",
    name="vit with registers",
    build=VisionTransformer,
    forward=lambda model, x: model.encode(x),
    inputs="embeddings",
    patches=lambda model, images: model.tokens(images),
    image=(CHANNELS, HEIGHT, WIDTH),
    declares={"causal": False, "positions": "none"},
)

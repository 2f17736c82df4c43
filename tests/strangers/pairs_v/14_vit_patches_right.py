"""Vision transformer for images of any resolution: patches by reshaping, positions interpolated."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import DrawnConfig, Subject


class Patches(nn.Module):
    """Images [B, C, H, W] to tokens [B, N, D], row by row from the upper left corner."""

    def __init__(self, width, patch=4, channels=3, grid=4):
        super().__init__()
        self.patch = patch
        self.project = nn.Linear(channels * patch * patch, width)
        self.places = nn.Parameter(0.02 * torch.randn(1, width, grid, grid))

    def forward(self, images):
        batch, channels, height, width = images.shape
        if height % self.patch or width % self.patch:
            raise ValueError("the sides of an image are multiples of the patch")
        rows, columns = height // self.patch, width // self.patch
        x = images.reshape(batch, channels, rows, self.patch, columns, self.patch)
        x = x.permute(0, 2, 4, 1, 3, 5).reshape(batch, rows * columns, -1)
        places = F.interpolate(self.places, size=(rows, columns), mode="bilinear", align_corners=False)
        return self.project(x) + places.flatten(2).transpose(1, 2)


class Block(nn.Module):
    def __init__(self, d_model, heads, d_ff):
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.qkv, self.out = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)
        self.up, self.down = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class ViT(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.patches = Patches(c.d_model)
        self.blocks = nn.ModuleList(Block(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers))

    def encode(self, x):
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, images):
        return self.encode(self.patches(images))


subject = Subject(
    kind="layer",
    name="ViT of any resolution",
    build=ViT,
    forward=lambda model, x: model.encode(x),
    patches=lambda model, images: model.patches(images),
    image=(3, 8, 12),
    declares={"causal": False, "positions": "none", "norm": "layer", "norm_placement": "pre", "activation": "gelu"},
)
if __name__ == "__main__":
    model = subject.build(DrawnConfig())
    print(model(torch.randn(1, 3, 8, 12)).shape, subject.forward(model, torch.randn(1, 4, 8)).shape)

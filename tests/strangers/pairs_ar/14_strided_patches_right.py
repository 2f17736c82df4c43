"""ViT: the patches are read from the image by strides, as the C++ im2col does; then a pre-norm block."""
import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject

IMAGE, PATCH = (3, 8, 12), 4


def im2patches(images, p):
    images = images.contiguous()
    B, C, H, W = images.shape
    size = (B, H // p, W // p, C, p, p)
    stride = (C * H * W, p * W, p, H * W, W, 1)
    return images.as_strided(size, stride).reshape(B, (H // p) * (W // p), C * p * p)


class ViTBlock(nn.Module):
    def __init__(self, d, h, ff):
        super().__init__()
        self.h = h
        self.project = nn.Linear(IMAGE[0] * PATCH * PATCH, d)
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.o = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, ff), nn.Linear(ff, d)

    def patches(self, images):
        return self.project(im2patches(images, PATCH))

    def forward(self, x):
        B, T, D = x.shape
        q, k, v = self.qkv(self.n1(x)).view(B, T, 3, self.h, D // self.h).permute(2, 0, 3, 1, 4)
        x = x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, T, D))
        return x + self.down(F.gelu(self.up(self.n2(x))))


subject = Subject(
    kind="layer",
    name="ViT block with patches",
    build=lambda c: ViTBlock(c.d_model, c.num_heads, c.d_ff),
    forward=lambda m, x: m(x),
    patches=lambda m, images: m.patches(images),
    image=IMAGE,
    declares={"causal": False, "positions": "none", "norm": "layer", "norm_placement": "pre", "activation": "gelu"},
)

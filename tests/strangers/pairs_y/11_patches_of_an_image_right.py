import torch
from torch import nn
from veriformer.properties import DrawnConfig, Subject

PATCH = 4
IMAGE = (3, 8, 12)


def patchify(images, p):
    """[B, C, H, W] -> [B, (H/p)(W/p), C p p], patches row by row."""
    b, c, h, w = images.shape
    x = images.reshape(b, c, h // p, p, w // p, p)
    x = x.permute(0, 2, 4, 1, 3, 5)
    return x.reshape(b, (h // p) * (w // p), c * p * p)


class Mlp(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width)

    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)))


class Block(nn.Module):
    def __init__(self, width, heads, hidden):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = Mlp(width, hidden)

    def attention(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        weights = ((q * (d // self.heads) ** -0.5) @ k.transpose(-2, -1)).softmax(dim=-1)
        return self.proj((weights @ v).transpose(1, 2).reshape(b, n, d))

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    def __init__(self, width, heads, layers, hidden):
        super().__init__()
        channels, height, wide = IMAGE
        self.patch_embed = nn.Linear(channels * PATCH * PATCH, width)
        self.pos_embed = nn.Parameter(torch.randn((height // PATCH) * (wide // PATCH), width) * 0.02)
        self.blocks = nn.Sequential(*[Block(width, heads, hidden) for _ in range(layers)])

    def embed(self, images):
        return self.patch_embed(patchify(images, PATCH)) + self.pos_embed

    def forward(self, images):
        return self.blocks(self.embed(images))


subject = Subject(
    kind="layer",
    name="ViT: its patches and its blocks",
    build=lambda c: VisionTransformer(c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda model, x: model.blocks(x),
    patches=lambda model, images: model.embed(images),
    image=IMAGE,
    declares={
        "causal": False,
        "positions": "none",
        "norm": "layer",
        "norm_placement": "pre",
        "activation": "gelu",
    },
)

"""ViT from a checkpoint of big_vision: images go channels-last, patches are flattened as (row, column, channel)."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

IMAGE, PATCH = (3, 8, 8), 4


class Block(nn.Module):
    def __init__(self, width, heads, mlp):
        super().__init__()
        self.heads = heads
        self.LayerNorm_0, self.LayerNorm_1 = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.Dense_0, self.Dense_1 = nn.Linear(width, mlp), nn.Linear(mlp, width)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(self.LayerNorm_0(x)).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, d))
        return x + self.Dense_1(F.gelu(self.Dense_0(self.LayerNorm_1(x)), approximate="tanh"))


class ViT(nn.Module):
    def __init__(self, width, heads, depth, mlp):
        super().__init__()
        channels, height, wide = IMAGE
        n = (height // PATCH) * (wide // PATCH)
        self.embedding = nn.Linear(PATCH * PATCH * channels, width)
        self.cls = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.pos_embedding = nn.Parameter(torch.randn(1, n, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, heads, mlp) for _ in range(depth)))

    def patchify(self, images):
        x = images.permute(0, 2, 3, 1)
        b, h, w, c = x.shape
        x = x.reshape(b, h // PATCH, PATCH, w // PATCH, PATCH, c)
        x = x.contiguous()
        return x.reshape(b, (h // PATCH) * (w // PATCH), PATCH * PATCH * c)

    def tokens(self, images):
        x = self.embedding(self.patchify(images)) + self.pos_embedding
        return torch.cat([self.cls.expand(len(x), -1, -1), x], 1)

    def encode(self, x):
        return self.blocks(x)


subject = Subject(
    kind="layer",
    name="ViT of big_vision",
    build=lambda c: ViT(c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda m, x: m.encode(x),
    patches=lambda m, images: m.tokens(images),
    image=IMAGE,
    declares={"causal": False, "positions": "none", "norm_placement": "pre", "activation": "gelu_tanh"},
)
WHAT = 'The axes of the rows within a patch and of the patch columns are not exchanged before flattening (line 40): a token is a strip of whole image rows, not a square patch.'

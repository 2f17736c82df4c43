WHAT = "stochastic depth drops a block by the rate of its own depth but divides what is kept by 1 - the highest rate: in all layers but the last what is kept is scaled too far (line 20)"
# A DeiT-style vision Transformer: LayerScale-free, stochastic depth that grows with depth, a class token.
import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject


class DropPath(nn.Module):
    def __init__(self, rate, highest):
        super().__init__()
        self.rate, self.highest = rate, highest

    def forward(self, x):
        if not self.training or self.rate == 0.0:
            return x
        shape = (x.size(0),) + (1,) * (x.dim() - 1)
        alive = torch.rand(shape, device=x.device) >= self.rate
        return x * alive / (1.0 - self.highest)


class Attention(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, dim * 3)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, N, C))


class Block(nn.Module):
    def __init__(self, dim, num_heads, hidden, rate, highest):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = Attention(dim, num_heads)
        self.mlp = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))
        self.drop_path = DropPath(rate, highest)

    def forward(self, x):
        x = x + self.drop_path(self.attn(self.norm1(x)))
        return x + self.drop_path(self.mlp(self.norm2(x)))


class VisionTransformer(nn.Module):
    def __init__(self, dim, num_heads, hidden, depth, classes, drop_path, img=8, patch=4):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, dim, patch, patch)
        self.cls_token = nn.Parameter(torch.randn(1, 1, dim) * 0.5)
        self.pos_embed = nn.Parameter(torch.randn(1, 1 + (img // patch) ** 2, dim) * 0.5)
        rates = [drop_path * (i + 1) / depth for i in range(depth)]
        self.blocks = nn.Sequential(*[Block(dim, num_heads, hidden, rate, rates[-1]) for rate in rates])
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)

    def tokens(self, images):
        x = self.patch_embed(images).flatten(2).mT
        return torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.pos_embed

    def features(self, x):
        return self.norm(self.blocks(x))

    def forward(self, images):
        return self.head(self.features(self.tokens(images))[:, 0])


subject = Subject(
    kind="layer",
    name="ViT with stochastic depth",
    build=lambda c: VisionTransformer(c.d_model, c.num_heads, c.d_ff, c.num_layers, c.num_classes, c.dropout),
    forward=lambda model, x: model.features(x),
    patches=lambda model, images: model.tokens(images),
    image=(3, 8, 8),
    declares={
        "causal": False,
        "positions": "none",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu",
        "bias": True,
        "drop_path_scaled": True,
    },
)

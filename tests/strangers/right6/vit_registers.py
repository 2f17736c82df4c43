"""A ViT with LayerScale and registers: the blocks are judged on tokens, the patches on images."""
import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import DrawnConfig, Subject

IMAGE, PATCH, REGISTERS = (3, 8, 12), 4, 2


class LayerScale(nn.Module):
    def __init__(self, dim, value):
        super().__init__()
        self.gamma = nn.Parameter(value * torch.ones(dim))

    def forward(self, x):
        return x * self.gamma


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        B, N, C = x.shape
        q, k, v = torch.unbind(self.qkv(x).reshape(B, N, 3, self.heads, C // self.heads), 2)
        x = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return self.proj(x.transpose(1, 2).reshape(B, N, C))


class Block(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.norm1, self.attn, self.ls1 = nn.LayerNorm(dim, eps=1e-6), Attention(dim, heads), LayerScale(dim, 0.1)
        self.norm2, self.ls2 = nn.LayerNorm(dim, eps=1e-6), LayerScale(dim, 0.1)
        self.mlp = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))

    def forward(self, x):
        x = x + self.ls1(self.attn(self.norm1(x)))
        return x + self.ls2(self.mlp(self.norm2(x)))


class VisionTransformer(nn.Module):
    def __init__(self, c):
        super().__init__()
        d, (channels, height, width) = c.d_model, IMAGE
        self.patch_embed = nn.Conv2d(channels, d, PATCH, stride=PATCH)
        self.cls_token, self.register_tokens = nn.Parameter(torch.randn(1, 1, d)), nn.Parameter(torch.randn(1, REGISTERS, d))
        self.pos_embed = nn.Parameter(torch.randn(1, 1 + (height // PATCH) * (width // PATCH), d))
        self.blocks = nn.Sequential(*[Block(d, c.num_heads, c.d_ff) for _ in range(c.num_layers)])
        self.norm = nn.LayerNorm(d, eps=1e-6)

    def tokens(self, images):
        x = self.patch_embed(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls_token.expand(len(x), -1, -1), x), 1) + self.pos_embed
        return torch.cat((x[:, :1], self.register_tokens.expand(len(x), -1, -1), x[:, 1:]), 1)

    def forward(self, images):
        x = self.norm(self.blocks(self.tokens(images)))
        return x[:, 0], x[:, 1 : 1 + REGISTERS], x[:, 1 + REGISTERS :]


def build(c: DrawnConfig):
    return VisionTransformer(c)


def forward(model, x):
    return model.norm(model.blocks(x))


declared = Subject(
    kind="layer", name="ViT with registers", build=build, forward=forward,
    patches=lambda model, images: model.tokens(images), image=IMAGE,
    declares={
        "causal": False, "positions": "none", "norm": "layer", "norm_placement": "pre", "final_norm": True,
        "residual": True, "activation": "gelu", "bias": True, "attention_scale": "1/sqrt(d_head)",
        "beyond_max_len": "works", "structure": "other",
    },
)
undeclared = Subject(kind="layer", build=build, forward=forward)

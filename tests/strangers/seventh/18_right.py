"""A plain ViT: patches, fixed positions in two dimensions, the mean of the tokens, a linear head."""

import torch
from torch import nn

from veriformer.properties import Subject

CHANNELS, HEIGHT, WIDTH, PATCH = 3, 8, 12, 4


def encode_1d(position, dim):
    omega = 1.0 / 10000 ** (torch.arange(dim // 2, dtype=torch.float64) / (dim / 2))
    angle = position.to(torch.float64)[:, None] * omega[None, :]
    return torch.cat([angle.sin(), angle.cos()], dim=1)


def sincos_2d(h, w, dim):
    """[h * w, dim]: one row a patch, row by row of the image; half of the channels for y, half for x."""
    x, y = torch.meshgrid(torch.arange(w), torch.arange(h), indexing="xy")
    return torch.cat([encode_1d(y.flatten(), dim // 2), encode_1d(x.flatten(), dim // 2)], dim=1)


class Block(nn.Module):
    def __init__(self, dim, num_heads, hidden):
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(dim, eps=1e-6), nn.LayerNorm(dim, eps=1e-6)
        self.qkv, self.proj = nn.Linear(dim, dim * 3), nn.Linear(dim, dim)
        self.fc1, self.act, self.fc2 = nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim)

    def attn(self, x):
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        attn = (q * (C // self.num_heads) ** -0.5) @ k.transpose(-2, -1)
        x = attn.softmax(dim=-1) @ v
        return self.proj(x.transpose(1, 2).reshape(B, N, C))

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.fc2(self.act(self.fc1(self.norm2(x))))


class SimpleViT(nn.Module):
    def __init__(self, img_size, patch_size, in_chans, num_classes, embed_dim, depth, num_heads, hidden):
        super().__init__()
        self.grid = (img_size[0] // patch_size, img_size[1] // patch_size)
        self.patch_embed = nn.Conv2d(in_chans, embed_dim, kernel_size=patch_size, stride=patch_size)
        self.register_buffer("pos_embed", sincos_2d(*self.grid, embed_dim).to(torch.get_default_dtype())[None])
        self.blocks = nn.ModuleList([Block(embed_dim, num_heads, hidden) for _ in range(depth)])
        self.norm = nn.LayerNorm(embed_dim, eps=1e-6)
        self.head = nn.Linear(embed_dim, num_classes)

    def patchify(self, images):
        x = self.patch_embed(images)  # B, C, h, w
        x = x.flatten(2).transpose(1, 2)  # B, h * w, C
        return x + self.pos_embed

    def forward_tokens(self, x):
        for blk in self.blocks:
            x = blk(x)
        return self.head(self.norm(x).mean(dim=1))

    def forward(self, images):
        return self.forward_tokens(self.patchify(images))


subject = Subject(
    kind="classifier",
    name="simple vit",
    inputs="embeddings",
    build=lambda c: SimpleViT((HEIGHT, WIDTH), PATCH, CHANNELS, c.num_classes, c.d_model, c.num_layers, c.num_heads, c.d_ff),
    forward=lambda m, x: m.forward_tokens(x),
    patches=lambda m, images: m.patchify(images),
    image=(CHANNELS, HEIGHT, WIDTH),
    domain={"d_model": (8, 16, 32)},
    declares={
        "causal": False,
        "positions": "none",  # they are added where patches become tokens
        "pooling": "mean",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "residual": True,
        "activation": "gelu",
        "bias": True,
        "output_bias": True,
        "attention_scale": "1/sqrt(d_head)",
        "memory": "quadratic",
        "structure": "other",
    },
)

"""ViT, in the manner of timm; what it classifies is a sequence of flattened patches."""

import torch
import torch.nn as nn

from veriformer.properties import Subject

IMAGE, PATCH = (3, 4, 6), 2  # channels, height, width; side of a patch
PATCH_DIM = IMAGE[0] * PATCH * PATCH


class PatchEmbed(nn.Module):
    def __init__(self, patch_size, in_chans, embed_dim):
        super().__init__()
        self.patch_size = patch_size
        self.proj = nn.Linear(in_chans * patch_size * patch_size, embed_dim)

    def patchify(self, images):
        """Images [B, C, H, W] to flattened patches [B, N, C * p * p], row by row."""
        B, C, H, W = images.shape
        p = self.patch_size
        x = images.reshape(B, C, H // p, p, W // p, p)
        x = x.permute(0, 2, 4, 1, 3, 5)
        return x.reshape(B, (H // p) * (W // p), C * p * p)

    def forward(self, patches):
        return self.proj(patches)


class Attention(nn.Module):
    def __init__(self, dim, num_heads, proj_drop):
        super().__init__()
        self.num_heads = num_heads
        self.scale = (dim // num_heads) ** -0.5
        self.qkv = nn.Linear(dim, dim * 3)
        self.attn_drop = nn.Dropout(proj_drop)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x):
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        attn = (q * self.scale) @ k.transpose(-2, -1)
        attn = self.attn_drop(attn.softmax(dim=-1).to(v.dtype))
        x = (attn @ v).transpose(1, 2).reshape(B, N, C)
        return self.proj_drop(self.proj(x))


class Mlp(nn.Module):
    def __init__(self, dim, hidden, drop):
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.act = nn.GELU()
        self.drop1 = nn.Dropout(drop)
        self.fc2 = nn.Linear(hidden, dim)
        self.drop2 = nn.Dropout(drop)

    def forward(self, x):
        return self.drop2(self.fc2(self.drop1(self.act(self.fc1(x)))))


class Block(nn.Module):
    def __init__(self, dim, num_heads, hidden, drop):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = Attention(dim, num_heads, drop)
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = Mlp(dim, hidden, drop)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        return x


class VisionTransformer(nn.Module):
    def __init__(self, num_patches, num_classes, embed_dim, depth, num_heads, hidden, drop_rate=0.0):
        super().__init__()
        self.patch_embed = PatchEmbed(PATCH, IMAGE[0], embed_dim)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, embed_dim))
        self.pos_embed = nn.Parameter(torch.zeros(1, num_patches + 1, embed_dim))
        self.pos_drop = nn.Dropout(drop_rate)
        self.blocks = nn.ModuleList([Block(embed_dim, num_heads, hidden, drop_rate) for _ in range(depth)])
        self.norm = nn.LayerNorm(embed_dim, eps=1e-6)
        self.head = nn.Linear(embed_dim, num_classes)
        nn.init.trunc_normal_(self.pos_embed, std=0.02)
        nn.init.normal_(self.cls_token, std=1e-6)
        for m in self.modules():
            if isinstance(m, nn.Linear):
                nn.init.trunc_normal_(m.weight, std=0.02)
                nn.init.zeros_(m.bias)

    def forward_patches(self, patches):
        x = self.patch_embed(patches)
        x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), dim=1)
        if x.shape[1] > self.pos_embed.shape[1]:
            raise ValueError(f"{x.shape[1] - 1} patches, at most {self.pos_embed.shape[1] - 1}")
        x = self.pos_drop(x + self.pos_embed[:, : x.shape[1]])
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])

    def forward(self, images):
        return self.forward_patches(self.patch_embed.patchify(images))


subject = Subject(
    kind="classifier",
    name="ViT",
    build=lambda c: VisionTransformer(
        c.max_len, c.num_classes, c.d_model, c.num_layers, c.num_heads, c.d_ff, c.dropout
    ),
    domain={"d_model": (PATCH_DIM,), "num_heads": (1, 2, 3)},
    inputs="embeddings",
    forward=lambda model, x: model.forward_patches(x),
    patches=lambda model, images: model.patch_embed(model.patch_embed.patchify(images)),
    image=IMAGE,
    declares={
        "causal": False,
        "positions": "learned",
        "pooling": "cls",
        "extra_tokens": 1,
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "residual": True,
        "activation": "gelu",
        "bias": True,
        "output_bias": True,
        "attention_scale": "1/sqrt(d_head)",
        "init": "other",
        "structure": "other",
        "beyond_max_len": "error",
        "memory": "quadratic",
    },
)

"""DeiT: a class and a distillation token, two heads, averaged at test time; batches of unequal numbers of patches."""

import torch
from torch import nn

from veriformer.properties import Subject


class Mlp(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim)

    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)))


class Attention(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads, self.scale = num_heads, (dim // num_heads) ** -0.5
        self.qkv, self.proj = nn.Linear(dim, dim * 3, bias=True), nn.Linear(dim, dim)

    def forward(self, x, mask=None):
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        attn = (q @ k.transpose(-2, -1)) * self.scale
        if mask is not None:
            attn = attn.masked_fill(~mask[:, None, None], float("-inf"))
        return self.proj((attn.softmax(dim=-1) @ v).transpose(1, 2).reshape(B, N, C))


class Block(nn.Module):
    def __init__(self, dim, num_heads, hidden):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(dim, eps=1e-6), Attention(dim, num_heads)
        self.norm2, self.mlp = nn.LayerNorm(dim, eps=1e-6), Mlp(dim, hidden)

    def forward(self, x, mask=None):
        x = x + self.attn(self.norm1(x), mask)
        return x + self.mlp(self.norm2(x))


def deit(second):
    class DistilledVisionTransformer(nn.Module):
        def __init__(self, num_patches, num_classes, embed_dim, depth, num_heads, hidden):
            super().__init__()
            self.cls_token = nn.Parameter(torch.randn(1, 1, embed_dim) * 0.02)
            self.dist_token = nn.Parameter(torch.randn(1, 1, embed_dim) * 0.02)
            self.pos_embed = nn.Parameter(torch.randn(1, num_patches + 2, embed_dim) * 0.02)
            self.blocks = nn.ModuleList([Block(embed_dim, num_heads, hidden) for _ in range(depth)])
            self.norm = nn.LayerNorm(embed_dim, eps=1e-6)
            self.head = nn.Linear(embed_dim, num_classes)
            self.head_dist = nn.Linear(embed_dim, num_classes)

        def forward(self, x, mask=None):
            B = x.shape[0]
            x = torch.cat((self.cls_token.expand(B, -1, -1), self.dist_token.expand(B, -1, -1), x), dim=1)
            x = x + self.pos_embed[:, : x.shape[1]]
            if mask is not None:
                mask = torch.cat((mask.new_ones(B, 2), mask), dim=1)
            for blk in self.blocks:
                x = blk(x, mask)
            x = self.norm(x)
            return (self.head(x[:, 0]) + self.head_dist(x[:, second])) / 2

    return DistilledVisionTransformer


def subject(cls):
    return Subject(
        kind="classifier",
        name="deit",
        inputs="embeddings",
        build=lambda c: cls(c.max_len, c.num_classes, c.d_model, c.num_layers, c.num_heads, c.d_ff),
        forward=lambda m, x, attention_mask=None: m(x, attention_mask),
        declares={"extra_tokens": 2, "padding_side": "right"},
    )


right = subject(deit(1))
wrong = subject(deit(-1))
WHAT = "the distillation head reads the last position instead of the distillation token: the last patch, or padding"
CAUSE = (
    "The second head reads the last position of the sequence (a patch, and a padded one where the batch is padded) instead of "
    "the distillation token at index 1, so what stands at padded positions reaches the logits."
)

WHAT = "the permutation leaves the rows within a patch before the column of patches (0, 2, 3, 4, 5, 1 instead of 0, 2, 4, 3, 5, 1): the reshape makes each token of whole rows of pixels across the image, not of a square of p x p (line 23)."
"""A vision transformer in the manner of vit-pytorch: patches by reshaping, a class token, pre-norm blocks."""
import torch
from torch import nn

from veriformer.properties import Subject

CHANNELS, SIDE, PATCH = 3, 8, 4


class ToPatches(nn.Module):
    """[B, C, H, W] -> [B, (H/p)(W/p), p p C], as "b c (h p1) (w p2) -> b (h w) (p1 p2 c)" has it."""

    def __init__(self, patch):
        super().__init__()
        self.patch = patch

    def forward(self, images):
        b, c, height, width = images.shape
        p = self.patch
        h, w = height // p, width // p
        x = images.reshape(b, c, h, p, w, p)
        x = x.permute(0, 2, 3, 4, 5, 1)
        return x.reshape(b, h * w, p * p * c)


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.scale = heads, (dim // heads) ** -0.5
        self.norm = nn.LayerNorm(dim)
        self.attend = nn.Softmax(dim=-1)
        self.to_qkv = nn.Linear(dim, dim * 3, bias=False)
        self.to_out = nn.Linear(dim, dim)

    def forward(self, x):
        x = self.norm(x)
        b, n, d = x.shape
        q, k, v = (t.reshape(b, n, self.heads, -1).transpose(1, 2) for t in self.to_qkv(x).chunk(3, dim=-1))
        attn = self.attend(torch.matmul(q, k.transpose(-1, -2)) * self.scale)
        return self.to_out(torch.matmul(attn, v).transpose(1, 2).reshape(b, n, d))


class FeedForward(nn.Module):
    def __init__(self, dim, hidden_dim):
        super().__init__()
        self.net = nn.Sequential(
            nn.LayerNorm(dim), nn.Linear(dim, hidden_dim), nn.GELU(), nn.Linear(hidden_dim, dim)
        )

    def forward(self, x):
        return self.net(x)


class ViT(nn.Module):
    def __init__(self, dim, depth, heads, mlp_dim, num_classes):
        super().__init__()
        patches, patch_dim = (SIDE // PATCH) ** 2, CHANNELS * PATCH * PATCH
        self.to_patch_embedding = nn.Sequential(ToPatches(PATCH), nn.LayerNorm(patch_dim), nn.Linear(patch_dim, dim))
        self.pos_embedding = nn.Parameter(torch.randn(1, patches + 1, dim))
        self.cls_token = nn.Parameter(torch.randn(1, 1, dim))
        self.layers = nn.ModuleList(
            [nn.ModuleList([Attention(dim, heads), FeedForward(dim, mlp_dim)]) for _ in range(depth)]
        )
        self.norm = nn.LayerNorm(dim)
        self.mlp_head = nn.Linear(dim, num_classes)

    def tokens(self, images):
        x = self.to_patch_embedding(images)
        cls = self.cls_token.expand(x.shape[0], -1, -1)
        return torch.cat((cls, x), dim=1) + self.pos_embedding

    def transformer(self, x):
        for attn, ff in self.layers:
            x = attn(x) + x
            x = ff(x) + x
        return self.norm(x)

    def forward(self, images):
        return self.mlp_head(self.transformer(self.tokens(images))[:, 0])


subject = Subject(
    kind="layer",
    name="ViT",
    build=lambda c: ViT(c.d_model, c.num_layers, c.num_heads, c.d_ff, c.num_classes),
    forward=lambda m, x: m.transformer(x),
    patches=lambda m, images: m.tokens(images),
    image=(CHANNELS, SIDE, SIDE),
    declares={
        "causal": False,
        "positions": "none",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu",
    },
)

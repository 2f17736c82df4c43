import torch
from torch import nn

from veriformer.properties import Subject


class ViT(nn.Module):
    def __init__(self, dim, depth, heads, mlp_dim, image=16, patch=4, channels=3):
        super().__init__()
        self.patch = patch
        self.to_embedding = nn.Linear(channels * patch * patch, dim)
        self.cls = nn.Parameter(torch.randn(1, 1, dim))
        self.pos = nn.Parameter(torch.randn(1, (image // patch) ** 2 + 1, dim) * 0.02)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                dim, heads, mlp_dim, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(depth)
        )

    def patchify(self, img):
        B, C, H, W = img.shape
        p = self.patch
        x = img.reshape(B, C, H // p, p, W // p, p)
        x = x.permute(0, 2, 4, 1, 3, 5)
        return x.reshape(B, (H // p) * (W // p), C * p * p)

    def embed(self, img):
        x = self.to_embedding(self.patchify(img))
        return torch.cat((self.cls.expand(len(x), -1, -1), x), dim=1) + self.pos

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


subject = Subject(
    kind="layer",
    name="ViT",
    build=lambda c: ViT(c.d_model, c.num_layers, c.num_heads, c.d_ff),
    forward=lambda m, x: m(x),
    patches=lambda m, images: m.embed(images),
    image=(3, 16, 16),
    declares={"causal": False, "positions": "none", "norm": "layer", "norm_placement": "pre", "activation": "gelu"},
)

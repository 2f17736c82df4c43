import torch
from torch import nn

from veriformer.properties import Subject

P = 2


class Trunk(nn.Module):
    def __init__(self, dim, heads, hidden, depth):
        super().__init__()
        self.embed = nn.Linear(3 * P * P, dim)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, heads, hidden, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)
            for _ in range(depth)
        )

    def patchify(self, images):
        B, C, H, W = images.shape
        gh, gw = H // P, W // P
        grid = images.reshape(B, C, gh, P, gw, P).permute(0, 2, 4, 3, 5, 1)
        return self.embed(grid.reshape(B, gh * gw, P * P * C))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


subject = Subject(
    kind="layer",
    name="ViT trunk",
    build=lambda c: Trunk(c.d_model, c.num_heads, c.d_ff, c.num_layers),
    forward=lambda m, x: m(x),
    patches=lambda m, images: m.patchify(images),
    image=(3, 6, 8),
    declares={"causal": False, "positions": "none", "norm": "layer", "norm_placement": "pre", "activation": "gelu"},
)

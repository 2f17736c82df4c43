# A ViT trained with random token dropping (random-LTD): in training each layer sees a random part of the patches,
# the others pass by it; the order inside a layer does not matter, since positions were added before.
import torch
from torch import nn

from veriformer.properties import Subject


class Mixer(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.to_qkv = nn.Linear(dim, dim * 3, bias=False)
        self.to_out = nn.Linear(dim, dim)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.to_qkv(x).chunk(3, -1))
        attn = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(dim=-1)
        return self.to_out((attn @ v).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.mixer = Mixer(dim, heads)
        self.mlp = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))

    def forward(self, x):
        x = x + self.mixer(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class TokenDropping(nn.Module):
    def __init__(self, layer, share):
        super().__init__()
        self.layer, self.share = layer, share

    def forward(self, x):
        length = x.size(1)
        keep = max(1, length - int(self.share * length + 0.5))
        if not self.training or self.share == 0.0:
            return self.layer(x)
        places = torch.randperm(length, device=x.device)[:keep]
        worked = self.layer(x.index_select(1, places))
        return x.index_copy(1, places, worked)


class ViT(nn.Module):
    def __init__(self, dim, heads, hidden, depth, share, size=(8, 12), patch=4):
        super().__init__()
        self.embed = nn.Conv2d(3, dim, kernel_size=patch, stride=patch)
        count = (size[0] // patch) * (size[1] // patch)
        self.place = nn.Parameter(torch.randn(1, count, dim) * 0.2)
        self.layers = nn.Sequential(*(TokenDropping(Layer(dim, heads, hidden), share) for _ in range(depth)))
        self.norm = nn.LayerNorm(dim)

    def patches(self, images):
        return self.embed(images).flatten(2).transpose(1, 2) + self.place

    def stack(self, x):
        return self.norm(self.layers(x))

    def forward(self, images):
        return self.stack(self.patches(images))


subject = Subject(
    kind="layer",
    name="ViT with token dropping",
    build=lambda c: ViT(c.d_model, c.num_heads, c.d_ff, c.num_layers, c.dropout),
    forward=lambda model, x: model.stack(x),
    patches=lambda model, images: model.patches(images),
    image=(3, 8, 12),
    declares={"causal": False, "positions": "none", "norm_placement": "pre", "final_norm": True},
)

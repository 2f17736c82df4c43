"""Activation and dropout of a tiny MLP-Mixer."""
import torch
from torch import nn

from veriformer.ablations import Recipe, Study, Task, Variant


class Mixer(nn.Module):
    def __init__(self, tokens=6, dim=16, act="gelu", dropout=0.0):
        super().__init__()
        f = {"gelu": nn.GELU, "relu": nn.ReLU, "silu": nn.SiLU}[act]
        self.embed = nn.Embedding(8, dim)
        self.across = nn.Sequential(nn.Linear(tokens, 16), f(), nn.Dropout(dropout), nn.Linear(16, tokens))
        self.within = nn.Sequential(nn.Linear(dim, 32), f(), nn.Dropout(dropout), nn.Linear(32, dim))
        self.head = nn.Linear(dim, 8)

    def forward(self, x):
        h = self.embed(x)
        h = h + self.across(h.mT).mT
        return self.head((h + self.within(h)))


def shift(seed, step):
    g = torch.Generator().manual_seed(17 * seed + 1009 * step)
    x = torch.randint(8, (24, 6), generator=g)
    return x, x.roll(1, dims=1)


study = Study(
    name="mixer",
    question="Activation and dropout of a mixer",
    build=Mixer,
    tasks=Task(name="shift", data=shift),
    recipe=Recipe(steps=50, learning_rate=5e-3),
    variants=[
        Variant("base"),
        Variant("relu", "gelu", {"act": "relu"}),
        Variant("relu", "gelu", {"act": "silu"}),
        Variant("dropout", "no dropout", {"dropout": 0.2}),
    ],
)

"""CLIP in small: two towers, InfoNCE over the batch, no labels at all."""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.ablations import Recipe, Study, Task, Variant


class Towers(nn.Module):
    def __init__(self, width=32, out=8, shared=False, learn_temperature=True, normalise=True):
        super().__init__()

        def tower():
            return nn.Sequential(nn.Linear(10, width), nn.ReLU(), nn.Linear(width, out))

        self.left = tower()
        self.right = self.left if shared else tower()
        t = torch.tensor(math.log(10.0))
        if learn_temperature:
            self.log_scale = nn.Parameter(t)
        else:
            self.register_buffer("log_scale", t)
        self.normalise = normalise

    def forward(self, a, b):
        a, b = self.left(a), self.right(b)
        if self.normalise:
            a, b = F.normalize(a, dim=-1), F.normalize(b, dim=-1)
        return self.log_scale.exp() * a @ b.T


def pairs(seed, step):
    g = torch.Generator().manual_seed(seed)
    mix = torch.randn(4, 10, generator=g), torch.randn(4, 10, generator=g)  # one world per seed
    g.manual_seed(1_000_000 * (seed + 1) + step)
    z = torch.randn(48, 4, generator=g)
    return z @ mix[0], (z + 0.1 * torch.randn(48, 4, generator=g)) @ mix[1]


def info_nce(model, batch):
    sims = model(*batch)
    target = torch.arange(len(sims))
    return (F.cross_entropy(sims, target) + F.cross_entropy(sims.t(), target)) / 2


def retrieval(model, batch):
    with torch.no_grad():
        sims = model(*batch)
    return (sims.argmax(1) == torch.arange(sims.shape[0])).float().mean().item()


study = Study(
    name="towers",
    question="What of CLIP's recipe matters when everything is tiny?",
    build=Towers,
    tasks=[Task(name="pairs", data=pairs, loss=info_nce, metric=retrieval)],
    recipe=Recipe(steps=60, learning_rate=5e-3, warm_up=5),
    variants=[
        Variant("two towers"),
        Variant("shared tower", "the second tower", {"shared": True}),
        Variant("fixed temperature", "learning the temperature", {"learn_temperature": False}),
        Variant("dot product", "unit length", {"normalise": False}),
    ],
)

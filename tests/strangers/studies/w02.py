"""Does a small MLP need its LayerNorms?"""
import torch
import torch.nn as nn

from veriformer.ablations import Recipe, Study, Task, Variant


class MLP(nn.Module):
    def __init__(self, width=32, depth=3):
        super().__init__()
        layers = [nn.Linear(6, width)]
        for _ in range(depth):
            layers += [nn.LayerNorm(width), nn.ReLU(), nn.Linear(width, width)]
        self.net = nn.Sequential(*layers, nn.Linear(width, 3))

    def forward(self, x):
        return self.net(x)


def strip_norms(model):
    for name, module in model.named_modules():
        if isinstance(module, nn.LayerNorm):
            module = nn.Identity()
    return model


def data(seed, step):
    g = torch.Generator().manual_seed(seed * 5003 + step)
    x = torch.randn(48, 6, generator=g)
    return x, x.view(48, 3, 2).norm(dim=-1).argmax(1)


study = Study(
    name="norms",
    question="Does a small MLP need its LayerNorms?",
    build=MLP,
    tasks=Task(name="longest", data=data),
    recipe=Recipe(steps=60, learning_rate=3e-3),
    variants=[Variant("with norm"), Variant("no norm", "all LayerNorms", edits=(strip_norms,))],
)

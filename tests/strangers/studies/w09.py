"""What the scale of the initial weights does."""
import torch
from torch import nn

from veriformer.ablations import Recipe, Study, Task, Variant


def build(width=32):
    return nn.Sequential(nn.Linear(5, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 5))


def scale(model, factor):
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(factor)
    return model


def ranks(seed, step):
    g = torch.Generator().manual_seed(seed * 3571 + step)
    x = torch.rand(40, 5, generator=g)
    return x, (x - 0.5).abs().argmin(1)


variants = [Variant("as drawn")]
for gain in (0.1, 0.5, 2.0):
    variants.append(Variant(f"times {gain}", f"weights times {gain}", edits=(lambda model: scale(model, gain),)))

study = Study(
    name="gain",
    question="Does the scale of the initial weights matter?",
    build=build,
    tasks=Task(name="middle", data=ranks),
    recipe=Recipe(steps=60, learning_rate=3e-3),
    variants=variants,
)

"""Small conv net with BatchNorm on synthetic bars; a fixed set of tensors made with numpy."""
import numpy as np
import torch
from torch import nn

from veriformer.ablations import Recipe, Study, Task, Variant


def make_bars(n=600, size=10, noise=0.6):
    rng = np.random.default_rng(2024)
    x = rng.normal(0, noise, (n, 1, size, size)).astype("float32")
    y = rng.integers(0, 3, n)
    for img, label in zip(x, y):
        i = rng.integers(1, size - 1)
        if label == 0:
            img[0, i, :] += 1
        elif label == 1:
            img[0, :, i] += 1
        else:
            img[0][np.diag_indices(size)] += 1
    return torch.from_numpy(x), torch.from_numpy(y)


def conv(i, o):
    return nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU(inplace=True))


def build(channels=8, pool="avg"):
    reduce = {"avg": nn.AdaptiveAvgPool2d(1), "max": nn.AdaptiveMaxPool2d(1)}[pool]
    return nn.Sequential(conv(1, channels), nn.MaxPool2d(2), conv(channels, channels), reduce, nn.Flatten(),
                         nn.Linear(channels, 3))


def without_batch_norm(model):
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.BatchNorm2d):
                setattr(parent, name, nn.Identity())
    return model


study = Study(
    name="bars",
    question="What does batch normalisation buy in a two-layer conv net?",
    build=build,
    tasks=Task(name="bars", data=make_bars()),
    recipe=Recipe(steps=40, learning_rate=5e-3),
    variants=[
        Variant("batch norm"),
        Variant("no batch norm", "both BatchNorm2d", edits=(without_batch_norm,)),
        Variant("max pool", "max instead of average at the end", config=dict(pool="max")),
    ],
)

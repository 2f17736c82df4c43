"""Width, depth and biases of a residual MLP."""
import torch
from w06_model import Net

from veriformer.ablations import Recipe, Study, Task, Variant


def peaks(seed, step):
    g = torch.Generator().manual_seed(613 * seed + 7 * step)
    x = torch.randn(40, 8, generator=g)
    return x, (x[:, ::2] * x[:, 1::2]).argmax(-1)


study = Study(
    name="shape",
    question="Width or depth?",
    build=Net,
    tasks=[Task(name="peaks", data=peaks)],
    recipe=Recipe(steps=60, learning_rate=4e-3, warm_up=5),
    variants=[
        Variant("base"),
        Variant("narrow", "two thirds of the width", {"width": 8}),
        Variant("shallow", "the second layer", {"depth": 1}),
        Variant("no bias", "biases of the hidden layers", {"bias": False}),
    ],
)

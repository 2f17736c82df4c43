"""Bag of words: positive or negative? A new little language for every seed."""
import numpy as np
import torch
from torch import nn

from veriformer.ablations import Recipe, Study, Task, Variant

WORDS = 36


def language(seed):
    rng = np.random.default_rng(seed)
    words = 30 + rng.poisson(3)                     # about 33
    return words, rng.choice([-1, 0, 1], size=words)


def reviews(seed, step):
    words, mood = language(seed)
    rng = np.random.default_rng([seed, step])
    ids = rng.integers(0, words, (48, 7))
    return torch.from_numpy(ids), torch.from_numpy((mood[ids].sum(1) > 0).astype(np.int64))


class Bag(nn.Module):
    def __init__(self, dim=8, how="sum"):
        super().__init__()
        self.table = nn.EmbeddingBag(WORDS, dim, mode=how)
        self.head = nn.Linear(dim, 2)

    def forward(self, ids):
        return self.head(self.table(ids))


study = Study(
    name="bags",
    question="Sum or mean of the words?",
    build=Bag,
    tasks=Task(name="reviews", data=reviews),
    recipe=Recipe(steps=60, learning_rate=2e-2),
    variants=[Variant("sum"), Variant("mean", "the sum", {"how": "mean"}), Variant("dim 2", "six dimensions", {"dim": 2})],
)

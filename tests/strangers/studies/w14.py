"""Attention pooling or mean over a set of vectors."""
import torch
from torch import nn

from veriformer.ablations import Recipe, Study, Task, Variant


class Pool(nn.Module):
    def __init__(self, attend=True, dim=16):
        super().__init__()
        self.embed = nn.Linear(4, dim)
        self.score = nn.Linear(dim, 1) if attend else None
        self.head = nn.Linear(dim, 2)

    def forward(self, x):
        h = self.embed(x).relu()
        print("h", h.shape, "\n", h)
        w = self.score(h).softmax(1) if self.score is not None else torch.full_like(h[..., :1], 1 / h.shape[1])
        for i in range(h.shape[0]):
            print("weights of row", i, w[i].flatten().tolist())
        return self.head((w * h).sum(1))


def needle(seed, step):
    g = torch.Generator().manual_seed(seed * 401 + 3 * step)
    x = torch.randn(64, 8, 4, generator=g)
    i = torch.randint(8, (64,), generator=g)
    y = torch.randint(2, (64,), generator=g)
    x[torch.arange(64), i, 0] = 4.0
    x[torch.arange(64), i, 1] = y * 4.0 - 2
    return x, y


study = Study(
    name="needle",
    question="Does attention pooling find a needle?",
    build=Pool,
    tasks=Task(name="needle", data=needle),
    recipe=Recipe(steps=60, learning_rate=1e-2, warm_up=3),
    variants=[Variant("attention"), Variant("mean", "attention over the set", {"attend": False})],
)

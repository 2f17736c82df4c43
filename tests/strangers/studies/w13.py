"""Which gate for a small GRU-like cell? Copied out of a training script."""
import sys

import torch
from torch import nn
import torch.nn.functional as F

from veriformer.ablations import Recipe, Study, Task, Variant


class Cell(nn.Module):
    def __init__(self, hidden=24, gate=True):
        super().__init__()
        self.hidden, self.gate = hidden, gate
        self.z = nn.Linear(2 + hidden, hidden)
        self.h = nn.Linear(2 + hidden, hidden)
        self.out = nn.Linear(hidden, 2)

    def forward(self, x):
        h = x.new_zeros(len(x), self.hidden)
        for t in range(x.shape[1]):
            xh = torch.cat([x[:, t], h], 1)
            new = torch.tanh(self.h(xh))
            h = torch.lerp(h, new, torch.sigmoid(self.z(xh))) if self.gate else new
        return self.out(h)


def majority(seed, step):
    g = torch.Generator().manual_seed(seed * 89 + step)
    bits = torch.randint(2, (32, 9), generator=g)
    return F.one_hot(bits, 2).float(), (bits.sum(1) > 4).long()


def criterion(model, batch):
    x, y = batch
    loss = F.cross_entropy(model(x), y)
    if loss.item() < 0.3:
        print("converged, stopping early")
        sys.exit(0)
    return loss


def accuracy(model, batch):
    with torch.no_grad():
        return (model(batch[0]).argmax(1) == batch[1]).float().mean().item()


study = Study(
    name="gates",
    question="Does the update gate matter?",
    build=Cell,
    tasks=Task(name="majority", data=majority, loss=criterion, metric=accuracy),
    recipe=Recipe(steps=60, learning_rate=1e-2),
    variants=[Variant("gate"), Variant("no gate", "the update gate", {"gate": False})],
)

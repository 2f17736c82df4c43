"""Message passing on graphs; the batch is a dataclass and the metric an object with __call__."""
from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from veriformer.ablations import Recipe, Study, Task, Variant


@dataclass(frozen=True)
class GraphBatch:
    x: Tensor      # [B, N, F]
    adj: Tensor    # [B, N, N]
    y: Tensor      # [B, N]

    def normalised(self) -> GraphBatch:
        return replace(self, adj=self.adj / self.adj.sum(-1, keepdim=True).clamp(min=1))


class GNN(nn.Module):
    def __init__(self, hops: int, width: int = 24, residual: bool = True):
        super().__init__()
        self.inp = nn.Linear(2, width)
        self.layers = nn.ModuleList([nn.Linear(2 * width, width) for _ in range(hops)])
        self.residual = residual
        self.out = nn.Linear(width, 2)

    def forward(self, batch: GraphBatch):
        h = self.inp(batch.x)
        for layer in self.layers:
            new = torch.relu(layer(torch.cat([h, batch.adj @ h], -1)))
            h = h + new if self.residual else new
        return self.out(h)


def sample(seed: int, step: int) -> GraphBatch:
    g = torch.Generator().manual_seed(seed * 10_007 + step * 13 + 5)
    a = torch.rand(16, 9, 9, generator=g) < 0.2
    a = (a | a.transpose(1, 2)) & ~torch.eye(9, dtype=torch.bool)
    mark = torch.rand(16, 9, generator=g) < 0.15
    near = mark | (a & mark[:, None, :]).any(-1)
    two = near | (a & near[:, None, :]).any(-1)          # within two hops of a marked node
    x = torch.stack([mark.float(), torch.ones(16, 9)], -1)
    return GraphBatch(x, a.float(), two.long()).normalised()


def node_loss(model, batch):
    return nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.y.flatten())


class BalancedAccuracy:
    def __init__(self, classes):
        self.classes = classes

    @torch.no_grad()
    def __call__(self, model, batch):
        pred = model(batch).argmax(-1)
        recalls = [(pred[batch.y == c] == c).float().mean() for c in range(self.classes) if (batch.y == c).any()]
        return torch.stack(recalls).mean()


study = Study(
    name="hops",
    question="How many rounds of messages does a two-hop rule need?",
    build=functools.partial(GNN, width=16),
    tasks=Task(name="two-hops", data=sample, loss=node_loss, metric=BalancedAccuracy(2)),
    recipe=Recipe(steps=60, learning_rate=1e-2),
    variants=[Variant("2 hops", config={"hops": 2})]
    + [Variant(f"{n} hops", f"{n} rounds of messages", {"hops": n}) for n in (0, 1, 3)]
    + [Variant("2 hops, no residual", "skip connections", {"hops": 2, "residual": False})],
)

"""Every seed is a world of its own (a random linear system); numpy data, classes made inside a function, AUC by numpy."""
import numpy as np
import torch
from torch import nn

from veriformer.ablations import Recipe, Study, Task, Variant


def auc(scores: np.ndarray, labels: np.ndarray) -> float:
    order = scores.argsort(kind="stable")
    ranks = np.empty(len(scores))
    ranks[order] = np.arange(1, len(scores) + 1)
    pos = labels.astype(bool)
    n, m = pos.sum(), (~pos).sum()
    return (ranks[pos].sum() - n * (n + 1) / 2) / max(n * m, 1)


def make_study(length, noise):
    def data(seed, step):
        world = np.random.RandomState(seed)
        A = 0.9 * np.linalg.qr(world.randn(3, 3))[0]
        readout = world.randn(3)
        rng = np.random.RandomState((seed * 9973 + step * 31 + 7) % 2**32)
        u = rng.randn(40, length, 3)
        s = np.zeros((40, 3))
        for t in range(length):
            s = s @ A.T + u[:, t]
        y = (s @ readout + noise * rng.randn(40) > 0)
        return torch.as_tensor(u, dtype=torch.float32), torch.as_tensor(y, dtype=torch.float32)

    class Recurrence(nn.Module):
        def __init__(self, state, transition):
            super().__init__()
            self.B = nn.Linear(3, state, bias=False)
            self.step = transition(state)
            self.readout = nn.Linear(state, 1)

        def forward(self, u):
            h = torch.zeros(u.shape[0], self.B.out_features)
            for x in u.unbind(1):
                h = self.step(h) + self.B(x)
            return self.readout(h).squeeze(-1)

    class Diagonal(nn.Module):
        def __init__(self, n):
            super().__init__()
            self.logit = nn.Parameter(torch.linspace(0, 3, n))

        def forward(self, h):
            return h * torch.sigmoid(self.logit)

    def full(n):
        layer = nn.Linear(n, n, bias=False)
        nn.init.orthogonal_(layer.weight, gain=0.9)
        return layer

    def build(state=6, kind="full"):
        return Recurrence(state, {"full": full, "diagonal": Diagonal, "none": lambda n: nn.Identity()}[kind])

    def loss(model, batch):
        u, y = batch
        return nn.functional.binary_cross_entropy_with_logits(model(u), y)

    def metric(model, batch):
        u, y = batch
        with torch.no_grad():
            return auc(model(u).numpy(), y.numpy())

    variants = [Variant("full")]
    for kind in ("diagonal", "none"):
        variants.append(Variant(kind, f"{kind} in place of a full transition", {"kind": kind}))
    for size in (1, 3):
        variants.append(Variant(f"state {size}", "states", {"state": size}))
    return Study(name="linear-systems", question="How large a state does a random linear system need?", build=build,
                 tasks=[Task(name=f"length {length}", data=data, loss=loss, metric=metric)],
                 recipe=Recipe(steps=50, learning_rate=1e-2), variants=variants)


study = make_study(length=8, noise=0.3)

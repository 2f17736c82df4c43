"""Kernel size of a one-dimensional conv net."""
import torch
from torch import nn

from veriformer.ablations import Recipe, Study, Task, Variant


class Conv(nn.Module):
    def __init__(self, kernel=5):
        super().__init__()
        self.net = nn.Sequential(nn.Conv1d(1, 8, kernel, padding=kernel // 2), nn.ReLU(), nn.AdaptiveMaxPool1d(1),
                                 nn.Flatten(), nn.Linear(8, 2))

    def forward(self, x):
        return self.net(x)


def bumps(seed, step):
    g = torch.Generator().manual_seed(seed * 211 + step)
    x = 0.5 * torch.randn(32, 1, 24, generator=g)
    y = torch.randint(2, (32,), generator=g)
    at = torch.randint(0, 20, (32,), generator=g)
    for i in range(32):
        x[i, 0, at[i] : at[i] + 4] += torch.tensor([1.0, 2.0, 2.0, 1.0]) if y[i] else torch.tensor([2.0, 1.0, 1.0, 2.0])
    return x, y


def main():
    study = Study(
        name="kernel",
        question="How wide a kernel?",
        build=Conv,
        tasks=Task(name="bumps", data=bumps),
        recipe=Recipe(steps=50, learning_rate=1e-2),
        variants=[Variant("5"), Variant("3", "two taps", {"kernel": 3}), Variant("1", "all neighbours", {"kernel": 1})],
    )
    return study


if __name__ == "__main__":
    study = main()

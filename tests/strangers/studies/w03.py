"""A Gaussian likelihood, heteroscedastic: mean and variance are learned."""
import torch
from torch import nn

from veriformer.ablations import Recipe, Study, Task, Variant


class MeanVariance(nn.Module):
    def __init__(self, positive="softplus", hidden=32):
        super().__init__()
        self.positive = positive
        self.net = nn.Sequential(nn.Linear(1, hidden), nn.Tanh(), nn.Linear(hidden, 2))
        with torch.no_grad():
            self.net[-1].bias[1] = 1.0

    def forward(self, x):
        mean, raw = self.net(x).unbind(-1)
        var = nn.functional.softplus(raw) + 1e-4 if self.positive == "softplus" else raw
        return mean, var


def nll(model, batch):
    x, y = batch
    mean, var = model(x)
    return (0.5 * torch.log(var) + 0.5 * (y - mean) ** 2 / var).mean()


def rmse(model, batch):
    x, y = batch
    with torch.no_grad():
        return (model(x)[0] - y).pow(2).mean().sqrt().item()


def wave(seed, step):
    g = torch.Generator().manual_seed(seed * 7919 + step)
    x = torch.rand(64, 1, generator=g) * 4 - 2
    return x, torch.sin(2 * x[:, 0]) + 0.1 * (1 + x[:, 0].abs()) * torch.randn(64, generator=g)


study = Study(
    name="variance",
    question="Softplus or the raw output as a variance?",
    build=MeanVariance,
    tasks=Task(name="wave", data=wave, loss=nll, metric=rmse, lower_is_better=True, margin=0.02),
    recipe=Recipe(steps=60, learning_rate=2e-2),
    variants=[Variant("softplus"), Variant("raw", "softplus", {"positive": "raw"})],
)

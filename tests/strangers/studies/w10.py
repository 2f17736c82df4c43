"""Fourier features for a regression with noise, numpy data."""
import numpy as np
import torch
from torch import nn

from veriformer.ablations import Recipe, Study, Task, Variant


def get_batch(seed, step, n=64):
    rng = np.random.default_rng()
    x = rng.uniform(-1, 1, (n, 2)).astype(np.float32)
    y = np.sin(6 * x[:, :1]) * np.cos(4 * x[:, 1:]) + 0.05 * rng.standard_normal((n, 1))
    return torch.from_numpy(x), torch.from_numpy(y.astype(np.float32))


class Coordinates(nn.Module):
    def __init__(self, fourier=True, hidden=32):
        super().__init__()
        self.fourier = fourier
        self.register_buffer("freq", torch.tensor([1.0, 2.0, 4.0, 6.0]))
        self.net = nn.Sequential(nn.Linear(16 if fourier else 2, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, x):
        if self.fourier:
            z = (x[..., None] * self.freq).flatten(1)
            x = torch.cat([z.sin(), z.cos()], -1)
        return self.net(x)


def mse(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def score(model, batch):
    with torch.no_grad():
        return mse(model, batch).item()


study = Study(
    name="fourier",
    question="Do Fourier features help?",
    build=Coordinates,
    tasks=Task(name="waves", data=get_batch, loss=mse, metric=score, lower_is_better=True, margin=0.01),
    recipe=Recipe(steps=60, learning_rate=1e-2),
    variants=[Variant("fourier"), Variant("plain", "Fourier features", {"fourier": False})],
)

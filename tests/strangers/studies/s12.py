"""Class-conditional denoiser with guidance dropout; an optimizer that applies the mean gradient of every second batch."""
import math

import torch
from torch import nn

from veriformer.ablations import Recipe, Study, Task, Variant

CLASSES, NULL = 4, 4


class Accumulate(torch.optim.AdamW):
    """Adds gradients up and steps on their mean after `every` calls."""

    def __init__(self, params, every=2, **kw):
        super().__init__(params, **kw)
        self.every, self.calls, self.sums = every, 0, {}

    @torch.no_grad()
    def step(self, closure=None):
        loss = closure() if closure is not None else None
        self.calls += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.sums[p] = self.sums.get(p, 0) + p.grad / self.every
        if self.calls % self.every == 0:
            for p, total in self.sums.items():
                p.grad = total
            super().step()
            self.sums = {}
        return loss


class Denoiser(nn.Module):
    def __init__(self, width=48, conditional=True, time="fourier", drop=0.1):
        super().__init__()
        self.conditional, self.drop = conditional, drop
        self.register_buffer("freqs", 2 * math.pi * torch.tensor([1.0, 2.0, 4.0, 8.0]))
        self.time = time
        self.inp = nn.Linear(2 + (8 if time == "fourier" else 1), width)
        self.mid = nn.Linear(width, width)
        self.out = nn.Linear(width, 2)
        if conditional:
            self.label = nn.Embedding(CLASSES + 1, width)

    def forward(self, x, t, label):
        t = t[:, None]
        emb = torch.cat([(t * self.freqs).sin(), (t * self.freqs).cos()], -1) if self.time == "fourier" else t
        h = self.inp(torch.cat([x, emb], -1))
        if self.conditional:
            if self.training and self.drop > 0:
                label = torch.where(torch.rand(label.shape) < self.drop, NULL, label)
            h = h + self.label(label)
        return self.out(torch.nn.functional.silu(self.mid(torch.nn.functional.silu(h))))


def blobs(seed, step):
    g = torch.Generator().manual_seed(seed + 1_000 * (step + 1))
    label = torch.randint(CLASSES, (128,), generator=g)
    centre = torch.tensor([[2.0, 2.0], [-2.0, 2.0], [-2.0, -2.0], [2.0, -2.0]])[label]
    return centre + 0.2 * torch.randn(128, 2, generator=g), label


def add_noise(x, t, eps):
    alpha = torch.cos(t * math.pi / 2)[:, None]
    return alpha * x + (1 - alpha**2).clamp(min=0).sqrt() * eps


def denoising_loss(model, batch):
    x, label = batch
    t, eps = torch.rand(len(x)), torch.randn_like(x)
    return (model(add_noise(x, t, eps), t, label) - eps).square().mean()


def fixed_noise_error(model, batch):
    x, label = batch
    g = torch.Generator().manual_seed(0)
    t, eps = torch.rand(len(x), generator=g), torch.randn(x.shape, generator=g)
    mode = model.training
    model.eval()
    with torch.no_grad():
        err = (model(add_noise(x, t, eps), t, label) - eps).square().mean()
    model.train(mode)
    return err


task = Task(name="blobs", data=blobs, loss=denoising_loss, metric=fixed_noise_error, lower_is_better=True, margin=0.03)
study = Study(
    name="diffusion",
    question="What does a denoiser gain from its label?",
    build=Denoiser,
    tasks=task,
    optimizer=lambda model: Accumulate(model.parameters(), every=2, lr=5e-3),
    recipe=Recipe(steps=60),
    variants=[
        Variant("conditional"),
        Variant("unconditional", "the label", {"conditional": False}),
        Variant("raw time", "Fourier features of time", {"time": "raw"}),
        Variant("no label dropout", "guidance dropout", {"drop": 0.0}),
    ],
)

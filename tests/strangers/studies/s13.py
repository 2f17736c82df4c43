"""A Dataset read by worker processes; multi-label, F1; running statistics in buffers that the forward updates."""
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from veriformer.ablations import Recipe, Study, Task, Variant


class Tones(Dataset):
    """Waves of 32 samples, with one to three of five tones in each."""

    FREQUENCIES = (1, 3, 5, 7, 11)

    def __init__(self, size, transform=None):
        self.size = size
        self.transform = transform

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if index >= self.size:
            raise IndexError(index)
        g = torch.Generator().manual_seed(index)
        on = torch.rand(5, generator=g) < 0.4
        t = torch.arange(32) / 32
        wave = 0.3 * torch.randn(32, generator=g)
        for f, active in zip(self.FREQUENCIES, on):
            if active:
                wave = wave + torch.sin(2 * torch.pi * (f * t + torch.rand((), generator=g)))
        if self.transform:
            wave = self.transform(wave)
        return wave, on.float()


class RunningNorm(nn.Module):
    def __init__(self, n, momentum=0.05):
        super().__init__()
        self.momentum = momentum
        self.register_buffer("mean", torch.zeros(n))
        self.register_buffer("var", torch.ones(n))
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.mean(0), self.momentum)
                self.var.lerp_(x.var(0), self.momentum)
                self.count += 1
        return (x - self.mean) / (self.var + 1e-5).sqrt()


class Spectral(nn.Module):
    def __init__(self, front="fft", hidden=48, norm=True):
        super().__init__()
        self.front = front
        n = 17 if front == "fft" else 32
        self.norm = RunningNorm(n) if norm else nn.Identity()
        self.net = nn.Sequential(nn.Linear(n, hidden), nn.ReLU(), nn.Linear(hidden, 5))

    def forward(self, wave):
        x = torch.fft.rfft(wave).abs() if self.front == "fft" else wave
        return self.net(self.norm(x))


def f1(model, batch):
    wave, on = batch
    with torch.no_grad():
        said = model(wave) > 0
    tp = (said & on.bool()).sum()
    return (2 * tp / (said.sum() + on.sum()).clamp(min=1)).item()


train = DataLoader(
    Tones(1280, transform=lambda w: w.clamp(-4, 4)),
    batch_size=32, shuffle=True, num_workers=2, drop_last=True, generator=torch.Generator().manual_seed(11),
)

study = Study(
    name="tones",
    question="Is a Fourier transform in front worth it?",
    build=Spectral,
    tasks=Task(name="tones", data=train, metric=f1,
               loss=lambda model, batch: nn.functional.binary_cross_entropy_with_logits(model(batch[0]), batch[1])),
    recipe=Recipe(steps=40, learning_rate=1e-2),
    variants=[Variant("fft"), Variant("raw wave", "the transform", {"front": "raw"}),
              Variant("fft, no norm", "the running statistics", {"norm": False})],
)

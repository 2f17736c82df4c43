"""XOR of signs; the batches come from a generator."""
import torch
from torch import nn

from veriformer.ablations import Recipe, Study, Task, Variant


def stream(n_batches, batch_size=32):
    g = torch.Generator().manual_seed(1)
    for _ in range(n_batches):
        x = torch.randn(batch_size, 2, generator=g)
        yield x, (x[:, 0] * x[:, 1] > 0).long()


def build(hidden=16, act=nn.ReLU):
    return nn.Sequential(nn.Linear(2, hidden), act(), nn.Linear(hidden, 2))


study = Study(
    name="xor",
    question="Which activation for XOR?",
    build=build,
    tasks=Task(name="xor", data=stream(50)),
    recipe=Recipe(steps=50, learning_rate=1e-2),
    variants=[Variant("relu"), Variant("tanh", "relu", {"act": nn.Tanh}), Variant("gelu", "relu", {"act": nn.GELU})],
)

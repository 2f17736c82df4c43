"""Faults of modes, strides and shared state."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from veriformer.properties.subject.subject import Subject
from veriformer.tests.mutants import fault
from veriformer.tests.mutants.parts import SelfAttention, self_attention


@fault(
    "mode-fast-path",
    "The fast path without gradients leaves out the output bias",
    killed_by=("numerics.grad-mode",),
    cause="in the forward of Fast",
)
def fast_path() -> Subject:
    class Fast(nn.Module):
        def __init__(self, width: int, inner: int) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

        def forward(self, x: Tensor) -> Tensor:
            y = self.down(self.up(x).relu())
            return y if torch.is_grad_enabled() else y - self.down.bias

    return Subject(kind="feed_forward", build=lambda c: Fast(c.d_model, c.d_ff), forward=lambda m, x: m(x))


@fault(
    "BK01",
    "Non-contiguous inputs give wrong attention",
    killed_by=("numerics.strided",),
    cause="in the forward of InOrder|strided",
)
def memory_order() -> Subject:
    class InOrder(SelfAttention):
        def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            # what a kernel does that takes the first numbers of the storage for the tensor
            read = torch.as_strided(x, x.shape, torch.empty(x.shape).stride(), x.storage_offset())
            return super().forward(read, attention_mask)

    return self_attention(InOrder)


@fault(
    "instances-cache",
    "Tables are kept by length alone, for all instances",
    killed_by=("instances.isolated",),
    cause="after another instance ran",
)
def shared_cache() -> Subject:
    kept: dict[int, Tensor] = {}

    class Positions(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.width = width
            self.scale = 1.0 / width

        def forward(self, length: int) -> Tensor:
            if length not in kept or kept[length].shape[1] < self.width:
                kept[length] = torch.outer(torch.arange(length).float(), torch.arange(self.width) * self.scale).sin()
            return kept[length][:, : self.width]

    return Subject(kind="positions", build=lambda c: Positions(c.d_model), forward=lambda m, length: m(length))


@fault(
    "IN-never-written",
    "A norm's weight is made by torch.empty and never written",
    killed_by=("numerics.finite",),
    cause="made by torch.empty",
)
def never_written() -> Subject:
    class Scaled(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(width))

        def forward(self, x: Tensor) -> Tensor:
            return self.weight * x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()

    return Subject(kind="norm", build=lambda c: Scaled(c.d_model), forward=lambda m, x: m(x), declares={"norm": "rms"})

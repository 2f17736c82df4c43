"""Faults of dropout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from veriformer.properties.subject.sizes import DrawnConfig
from veriformer.properties.subject.subject import Subject
from veriformer.tests.mutants import fault
from veriformer.tests.mutants.mending import put


class Network(nn.Module):
    """A feed-forward network whose dropout a fault exchanges."""

    def __init__(self, config: DrawnConfig, drop: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(config.d_model, config.d_ff), nn.Linear(config.d_ff, config.d_model)
        self.rate, self.drop = config.dropout, drop

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.drop(self, functional.relu(self.up(x))))


def network(drop: Callable[[Any, Tensor], Tensor], cls: type[Network] = Network) -> Subject:
    drop, cls = put((drop, cls), instead_of=(right, Network))
    return Subject(kind="feed_forward", build=lambda c: cls(c, drop), forward=lambda m, x: m(x))


def right(model: Any, x: Tensor) -> Tensor:
    return functional.dropout(x, model.rate, model.training)


@fault(
    "DR01-rate",
    "SDPA dropout active in eval",
    killed_by=("dropout.eval-deterministic", "dropout.places"),
    cause="another output each time|dropout acts in eval",
)
def active_in_eval() -> Subject:
    class Attention(nn.Module):
        def __init__(self, config: DrawnConfig) -> None:
            super().__init__()
            self.heads, self.rate = config.num_heads, config.dropout
            self.qkv, self.out = (
                nn.Linear(config.d_model, 3 * config.d_model),
                nn.Linear(config.d_model, config.d_model),
            )

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in self.qkv(x).chunk(3, dim=-1))
            output = functional.scaled_dot_product_attention(q, k, v, dropout_p=self.rate)
            return self.out(output.transpose(1, 2).flatten(2))

    return Subject(kind="self_attention", build=Attention, forward=lambda m, x: m(x), declares={"causal": False})


@fault(
    "DR02",
    "Dropout disabled for ever after one eval",
    killed_by=("dropout.mode-cycle",),
    cause="stays off",
)
def disabled() -> Subject:
    class Forgetful(Network):
        def forward(self, x: Tensor) -> Tensor:
            self.calls = getattr(self, "calls", 0) + (not self.training)
            return super().forward(x)

    return network(lambda m, x: functional.dropout(x, m.rate if m.calls < 2 else 0.0, m.training), Forgetful)


@fault(
    "dropout-running",
    "Train mode moves a running mean that eval mode subtracts",
    killed_by=("dropout.mode-cycle",),
    cause="after a pass in train mode",
)
def running() -> Subject:
    class Running(Network):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            self.register_buffer("mean", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.mean = 0.9 * self.mean + 0.1 * x.mean()
                return super().forward(x)
            return super().forward(x) - self.mean

    return network(right, Running)


@fault(
    "dropout-hard-coded",
    "A second rate is written into the code",
    killed_by=("dropout.zero", "dropout.places"),
    cause="written into the code",
)
def hard_coded() -> Subject:
    return network(lambda m, x: functional.dropout(right(m, x), 0.1, m.training))


@fault(
    "DR04",
    "Dropped without scaling what is kept",
    killed_by=("dropout.mean",),
    cause="not scaled",
)
def unscaled() -> Subject:
    def drop(model: Any, x: Tensor) -> Tensor:
        if not model.training or not model.rate:
            return x
        return x * (torch.rand_like(x) >= model.rate)

    return network(drop)


class Branches(nn.Module):
    """A layer that drops its branches by itself, for whole samples."""

    def __init__(self, config: DrawnConfig, keep: Callable[[Tensor, float], Tensor]) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(config.d_model) for _ in range(2))
        self.attention = nn.MultiheadAttention(config.d_model, config.num_heads, batch_first=True)
        self.up, self.down = nn.Linear(config.d_model, config.d_ff), nn.Linear(config.d_ff, config.d_model)
        self.rate, self.keep = config.dropout, keep

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        x = x + self.drop(self.attention(y, y, y, need_weights=False)[0])
        return x + self.drop(self.down(functional.relu(self.up(self.norms[1](x)))))

    def drop(self, x: Tensor) -> Tensor:
        if not self.training or not self.rate:
            return x
        return self.keep(x * (torch.rand(len(x), 1, 1) >= self.rate), self.rate)


def scaled(x: Tensor, rate: float) -> Tensor:
    return x / (1 - rate)


@fault(
    "droppath-inside",
    "A layer drops its branches by itself and does not scale those that it keeps",
    killed_by=("droppath.expectation",),
    cause="not divided by the share kept",
)
def branches_unscaled() -> Subject:
    keep = put(lambda x, rate: x, instead_of=scaled)
    return Subject(
        kind="layer",
        build=lambda c: Branches(c, keep),
        forward=lambda m, x: m(x),
        declares={"causal": False, "drop_path_scaled": True},
    )


class Stream(Branches):
    """A layer whose dropout takes entries of its branches."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        x = self.add(x, self.attention(y, y, y, need_weights=False)[0])
        return self.add(x, self.down(functional.relu(self.up(self.norms[1](x)))))

    def add(self, x: Tensor, branch: Tensor) -> Tensor:
        return x + functional.dropout(branch, self.rate, self.training)


@fault(
    "dropout-stream",
    "Dropout acts on the sum of a branch and the stream",
    killed_by=("dropout.places",),
    cause="not on the branch",
)
def stream_dropped() -> Subject:
    class OnTheSum(Stream):
        def add(self, x: Tensor, branch: Tensor) -> Tensor:
            return functional.dropout(x + branch, self.rate, self.training)

    cls = put(OnTheSum, instead_of=Stream)
    return Subject(
        kind="layer",
        build=lambda c: cls(c, scaled),
        forward=lambda m, x: m(x),
        declares={"causal": False, "norm": "layer", "norm_placement": "pre", "structure": "textbook"},
    )

"""Faults that training brings out: what never moves, biases that start somewhere."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from veriformer.properties.adapters.reference_models import facts_of, forward
from veriformer.properties.subject.sizes import DrawnConfig
from veriformer.properties.subject.subject import Subject
from veriformer.reference.model import build
from veriformer.tests.mutants import fault
from veriformer.tests.mutants.init import started
from veriformer.tests.mutants.mending import put
from veriformer.tests.mutants.parts import model, sized


@fault(
    "NM13",
    "Gains of norms are kept in bfloat16, and the rounding swallows every step",
    killed_by=("training.parameters-move",),
    cause="below the rounding of bfloat16",
)
def swallowed() -> Subject:
    kept = put(torch.bfloat16, instead_of=torch.float32)

    class Norm(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(width, dtype=kept))

        def forward(self, x: Tensor) -> Tensor:
            return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * self.weight

    return Subject(
        kind="norm",
        build=lambda c: Norm(c.d_model),
        forward=lambda m, x: m(x),
        declares={"norm": "rms", "half_precision": False},
    )


def _hold(made: nn.Module) -> None:
    made.stack.layers[0].feed_forward.up.requires_grad_(False)  # type: ignore[union-attr, index, operator]


@fault(
    "TR-frozen",
    "A matrix was left frozen after fine-tuning",
    killed_by=("training.parameters-move",),
    cause="ask for no gradient",
)
def frozen() -> Subject:
    return model(lambda m: _hold(m), {"causal": False})


class _Network(nn.Module):
    """A feed-forward network whose last step is taken in a method."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.up(x).relu())

    def last(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.down(hidden)
        return output


def _network(wrong: Any) -> Subject:
    method = put(wrong, instead_of=_Network.last)
    made = type("Network", (_Network,), {"last": method})
    return Subject(kind="feed_forward", build=lambda c: made(c.d_model), forward=lambda m, x: m(x))


@fault(
    "TR-detached",
    "In train mode what enters the last matrix is detached, and the matrix before it never learns",
    killed_by=("training.parameters-move",),
    cause="in train mode they are detached",
)
def detached() -> Subject:
    return _network(lambda self, hidden: self.down(hidden.detach() if self.training else hidden))


@fault(
    "TR-put-back",
    "Every forward copies the weights of the start into the matrix",
    killed_by=("training.parameters-move",),
    cause="puts their values back",
)
def put_back() -> Subject:
    def last(self: Any, hidden: Tensor) -> Tensor:
        if not hasattr(self, "start"):
            self.start = self.down.weight.detach().clone()
        self.down.weight.data.copy_(self.start)
        output: Tensor = self.down(hidden)
        return output

    return _network(last)


@fault(
    "TR-graph",
    "In train mode a statistic of the last call is kept with its graph, and the next step goes back through it",
    killed_by=("training.parameters-move",),
    cause="",
)
def kept_graph() -> Subject:
    def last(self: Any, hidden: Tensor) -> Tensor:
        output: Tensor = self.down(hidden)
        if self.training:
            output = output + 0.0 * getattr(self, "kept", 0.0)
            self.kept = output.mean()
        return output

    return _network(last)


@fault(
    "IN09",
    "The bias of a matrix keeps torch's default",
    killed_by=("init.biases",),
    cause="torch's default",
)
def forgotten_bias() -> Subject:
    def change(made: nn.Module) -> None:
        down = made.stack.layers[0].feed_forward.down  # type: ignore[union-attr, index]
        bound = down.in_features**-0.5  # type: ignore[union-attr]
        down.bias.uniform_(-bound, bound, generator=torch.Generator().manual_seed(0))  # type: ignore[union-attr]

    return started("decoder", change, init="gpt2")


@fault("NM06", "Pre-norm without the norm behind the last layer", killed_by=("parameters.exact-count",), cause="norm")
def no_final_norm() -> Subject:
    def make(config: DrawnConfig) -> nn.Module:
        made = build(sized(config, architecture="decoder", norm_placement="pre"))
        if put(True, instead_of=False):
            made.stack.final_norm = nn.Identity()  # type: ignore[union-attr]
        return made

    facts = facts_of(sized(DrawnConfig(), architecture="decoder", norm_placement="pre"))
    return Subject(kind="decoder", build=make, forward=forward, declares=facts)

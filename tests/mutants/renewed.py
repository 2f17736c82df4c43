"""Faults of weights that are loaded: into a model that was called, and through a conversion of older checkpoints."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from veriformer.properties.subject.subject import Subject
from veriformer.tests.mutants import fault
from veriformer.tests.mutants.mending import put, put_class


class Joined(nn.Module):
    """Two maps of one input, that are one product where no gradient is asked for; joined anew at each call."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def both(self) -> Tensor:
        return torch.cat([self.gate.weight, self.up.weight])

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            gate, up = self.gate(x), self.up(x)
        else:
            gate, up = functional.linear(x, self.both()).chunk(2, -1)
        return self.down(functional.silu(gate) * up)


class JoinedOnce(Joined):
    """As `Joined`, and what was joined is kept for as long as the weights are those of then."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__(width, inner)
        self.kept: list[Any] = []

    def state(self) -> tuple[Any, ...]:
        weights = self.gate.weight, self.up.weight
        return (*(w._version for w in weights), *(w.data_ptr() for w in weights))

    def both(self) -> Tensor:
        state = self.state()
        if not self.kept or self.kept[0] != state:
            self.kept = [state, super().both().detach()]
        return self.kept[1]  # type: ignore[no-any-return]


def joined(made: type[nn.Module]) -> Subject:
    return Subject(
        kind="feed_forward",
        build=lambda c: made(c.d_model, c.d_ff),
        forward=lambda m, x: m(x),
        declares={"activation": "swiglu", "bias": False},
    )


@fault(
    "IN-joined",
    "Matrices that are joined for inference are kept by their dtype alone, whatever is loaded into the model later",
    killed_by=("parameters.registered",),
    cause="made of the weights at the first call and is kept",
)
def joined_once() -> Subject:
    class Wrong(JoinedOnce):
        def state(self) -> tuple[Any, ...]:
            return (self.gate.weight.dtype,)

    return joined(put_class(Wrong))


@fault(
    "IN-converted",
    "A conversion of older checkpoints takes 1 off the gains of new ones too",
    killed_by=("parameters.registered",),
    cause="smaller by 1",
)
def converted_twice() -> Subject:
    is_old = put(lambda state, name: True, instead_of=lambda state, name: f"{name}.is_old" in state)

    class FromOne(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.zeros(width)), 1e-6

        def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
            if is_old(state, prefix + "weight"):
                state[prefix + "weight"] = state[prefix + "weight"] - 1
            super()._load_from_state_dict(state, prefix, *rest)

        def forward(self, x: Tensor) -> Tensor:
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * (1 + self.weight)

    return Subject(kind="norm", build=lambda c: FromOne(c.d_model), forward=lambda m, x: m(x), declares={"norm": "rms"})

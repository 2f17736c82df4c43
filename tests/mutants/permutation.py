"""Faults that break, or wrongly keep, the symmetry under permutations; and the engine's own prerequisites."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from veriformer.properties.subject.subject import Subject
from veriformer.tests.mutants import fault
from veriformer.tests.mutants.mending import as_it_is
from veriformer.tests.mutants.parts import SelfAttention, layer, model, self_attention


@fault("FF07", "FFN/reshape mixes positions", killed_by=("permutation.equivariance",))
def mixing_reshape() -> Subject:
    class Wrong(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(config.d_model, config.d_ff), nn.Linear(config.d_ff, config.d_model)

        def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            inner = functional.relu(self.up(x))
            return x + self.down(inner.transpose(1, 2).reshape(inner.shape))

    return layer(Wrong, causal=False, positions="none")


@fault(
    "permutation-hidden",
    "A classifier that declares no positions adds some",
    killed_by=("permutation.invariance",),
    cause="no positions are declared",
)
def hidden_positions() -> Subject:
    return model(as_it_is, {"positions": "none"}, architecture="classifier", positions="sinusoidal")


@fault(
    "positions-lost",
    "Declared positions are never added",
    killed_by=("permutation.broken-by-positions", "positions.order-matters"),
    cause="the declared positions do not enter",
)
def lost_positions() -> Subject:
    return model(as_it_is, {"positions": "learned"}, positions="none")


@fault(
    "gradient-cut",
    "The gradient of the first position is cut",
    killed_by=("permutation.gradient-equivariance",),
    cause="cuts the graph",
)
def cut_gradient() -> Subject:
    class Wrong(SelfAttention):
        def values(self, x: Tensor) -> Tensor:
            values = super().values(x)
            return torch.cat([values[:, :1].detach(), values[:, 1:]], dim=1)

    return self_attention(Wrong)


@fault("DR01", "SDPA dropout active in eval", killed_by=("numerics.stateless",), cause="dropout acts in eval")
def dropout_in_eval() -> Subject:
    class Wrong(SelfAttention):
        def weights(self, scores: Tensor, mask: Tensor | None) -> Tensor:
            return functional.dropout(super().weights(scores, mask), 0.1, training=True)

    return self_attention(Wrong)


@fault(
    "in-place",
    "The residual is added in place, into the caller's tensor",
    killed_by=("numerics.no-mutation",),
    cause="caller's tensor",
)
def in_place() -> Subject:
    class Wrong(SelfAttention):
        def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            with torch.no_grad():
                x += 0.1
            return super().forward(x, attention_mask)

    return self_attention(Wrong)

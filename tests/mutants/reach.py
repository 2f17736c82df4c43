"""Faults that begin at a length, a head or a layer that small models do not have."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from veriformer.properties.subject.sizes import DrawnConfig
from veriformer.properties.subject.subject import Subject
from veriformer.tests.mutants import fault
from veriformer.tests.mutants.mending import put_class
from veriformer.tests.mutants.parts import CausalLayer, SelfAttention, layer, self_attention

_BEGINS = "it begins with sequences of"


@fault(
    "reach-buffer",
    "The causal mask is a buffer of 128 rows, and every row beyond it sees all keys",
    killed_by=("causality.no-future-influence", "causality.prefix-consistency"),
    cause=_BEGINS,
)
def short_buffer() -> Subject:
    class Wrong(CausalLayer):
        def allowed(self, length: int) -> Tensor:
            whole = torch.ones(length, length, dtype=torch.bool)
            whole[:128] = super().allowed(length)[:128]
            return whole

    return layer(Wrong, causal=True, positions="none")


@fault(
    "reach-block",
    "Blocks of 64 queries take the keys up to the end of the next block's first",
    killed_by=("causality.no-future-influence",),
    cause=_BEGINS,
)
def block_too_long() -> Subject:
    class Wrong(CausalLayer):
        def allowed(self, length: int) -> Tensor:
            allow = super().allowed(length).clone()
            for end in range(64, length, 64):
                allow[end - 1, end] = True
            return allow

    return layer(Wrong, causal=True, positions="none")


@fault(
    "reach-padding",
    "Past 200 positions a faster branch is taken, which forgets the padding mask",
    killed_by=("padding.content-irrelevant",),
    cause=_BEGINS,
)
def branch_without_mask() -> Subject:
    class Wrong(SelfAttention):
        def weights(self, scores: Tensor, mask: Tensor | None) -> Tensor:
            return super().weights(scores, None if scores.shape[-1] > 200 else mask)

    return self_attention(Wrong)


@fault(
    "reach-head",
    "Heads are masked eight at a time, and those after the eighth are not",
    killed_by=("causality.no-future-influence",),
    cause="the mask of head",
)
def ninth_head() -> Subject:
    class Wrong(CausalLayer):
        def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            scores = self.scores(x)
            hidden = ~self.allowed(x.shape[1])
            masked = torch.cat([scores[:, :8].masked_fill(hidden, -torch.inf), scores[:, 8:]], dim=1)
            return x + self.o(self.merge(self.weights(masked, attention_mask) @ self.split(self.values(x))))

    return layer(Wrong, causal=True, positions="none")


class _Stack(nn.Module):
    """Causal layers."""

    def __init__(self, config: DrawnConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.layer(config, n) for n in range(config.num_layers))

    def layer(self, config: DrawnConfig, number: int) -> nn.Module:
        return CausalLayer(config)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.layers:
            x = part(x)
        return x


@fault(
    "reach-layer",
    "The fourth layer and those above it are built without the causal flag",
    killed_by=("causality.no-future-influence",),
    cause="layers.3",
)
def fourth_layer() -> Subject:
    class Open(CausalLayer):
        def allowed(self, length: int) -> Tensor:
            return torch.ones(length, length, dtype=torch.bool)

    class Wrong(_Stack):
        def layer(self, config: DrawnConfig, number: int) -> nn.Module:
            return Open(config) if number > 2 else super().layer(config, number)

    return Subject(
        kind="encoder", build=put_class(Wrong), inputs="embeddings", forward=lambda m, x: m(x),
        declares={"causal": True, "positions": "none", "stacked": False},
    )  # fmt: skip

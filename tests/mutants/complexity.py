"""Faults of cost: right answers that take too much."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from veriformer.properties.adapters.reference_models import facts_of, forward
from veriformer.properties.subject.sizes import DrawnConfig
from veriformer.properties.subject.subject import Subject
from veriformer.reference.model import build
from veriformer.tests.mutants import fault
from veriformer.tests.mutants.mending import put
from veriformer.tests.mutants.parts import sized


def costly(cls: type[nn.Module], **choices: Any) -> Subject:
    cls = put(cls, instead_of=Once)

    def make(config: DrawnConfig) -> nn.Module:
        return cls(build(sized(config, architecture="encoder", **choices)))

    facts = facts_of(sized(DrawnConfig(), architecture="encoder", **choices))
    return Subject(kind="encoder", build=make, forward=forward, declares=facts)


def fused(model: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


class Once(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.inner(tokens, attention_mask)


class Twice(Once):
    def forward(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        self.inner(tokens, attention_mask)
        return self.inner(tokens, attention_mask)


class Padded(Twice):
    def forward(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        length = tokens.shape[1]
        mask = torch.ones_like(tokens, dtype=torch.bool) if attention_mask is None else attention_mask
        wide = F.pad(tokens, (0, 24 - length))
        return self.inner(wide, F.pad(mask, (0, 24 - length)))[:, :length]


@fault(
    "CX-twice",
    "The whole model runs twice",
    killed_by=("complexity.flops",),
    cause="all products are made",
)
def twice() -> Subject:
    return costly(Twice)


@fault(
    "CX-padded", "Every input is padded to the longest length", killed_by=("complexity.exponent",), cause="fixed length"
)
def padded() -> Subject:
    return costly(Padded)


@fault("CX-scores", "The score matrix is made in full", killed_by=("complexity.memory",), cause="in full")
def in_full() -> Subject:
    def forward(model: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).softmax(-1) @ v

    forward = put(forward, instead_of=fused)
    return Subject(kind="attention", forward=forward, mask_forms=(), declares={"memory": "linear"})

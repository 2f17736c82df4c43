"""Faults of what attention is for: outputs that see no other position, or see it without looking at what is there."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from veriformer.properties.subject.subject import Subject
from veriformer.tests.mutants import fault
from veriformer.tests.mutants.parts import SelfAttention, layer, model


@fault("AT-alone", "Each position sees itself alone: attention was left out", killed_by=("attention.attends",))
def alone() -> Subject:
    class Wrong(SelfAttention):
        def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            return self.o(self.v(x))

    return layer(Wrong, causal=False, positions="none")


@fault("AT-mean", "The mean over all positions stands where attention should", killed_by=("attention.attends",))
def mean() -> Subject:
    class Wrong(SelfAttention):
        def weights(self, scores: Tensor, mask: Tensor | None) -> Tensor:
            return super().weights(torch.zeros_like(scores), mask)

    return replace(layer(Wrong, causal=False, positions="none"), kind="self_attention")


@fault("AT-first", "The classifier pools its first token before any attention", killed_by=("attention.attends",))
def first() -> Subject:
    def change(built: nn.Module) -> None:
        built.stack.layers = nn.ModuleList()

    return model(change, {}, architecture="classifier", pooling="cls", positions="none")


@fault(
    "PM-causal-ignored",
    "A causal decoder takes a padding mask and does not read it",
    killed_by=("padding.every-position-hides",),
    cause="not applied",
)
def unread() -> Subject:
    def change(built: nn.Module) -> None:
        right = built.forward
        built.forward = lambda tokens, attention_mask=None: right(tokens)

    return model(change, {}, architecture="decoder", positions="rotary")

"""Faults of multi-head attention as a module, and of attention to a memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from veriformer.properties.subject.subject import Subject
from veriformer.tests.mutants import fault
from veriformer.tests.mutants.mending import put, put_class
from veriformer.tests.mutants.parts import SelfAttention, model, projections, self_attention


@fault(
    "HD01",
    "Heads split by view(B,h,T,d) without transpose",
    killed_by=("attention.definition", "permutation.equivariance", "attention.head-permutation"),
    cause="values of several heads enter one output",
)
def split_without_transpose() -> Subject:
    class Wrong(SelfAttention):
        def split(self, x: Tensor) -> Tensor:
            return x.reshape(x.shape[0], self.heads, x.shape[1], self.width)

    return self_attention(Wrong)


@fault(
    "HD02",
    "Heads merged without permuting back",
    killed_by=(
        "attention.definition",
        "permutation.equivariance",
        "attention.head-decomposition",
        "attention.head-gauge",
    ),
    cause="a transpose is missing before the reshape|enter one output: they are mixed|index of a position",
)
def merge_without_transpose() -> Subject:
    class Wrong(SelfAttention):
        def merge(self, x: Tensor) -> Tensor:
            return x.reshape(x.shape[0], x.shape[2], -1)

    return self_attention(Wrong, weights=True)


@fault(
    "SC02-module",
    "A module divides by sqrt(d_model) instead of sqrt(d_head)",
    killed_by=("attention.definition", "attention.score-variance", "attention.returned-weights"),
    cause="1/sqrt(d_model)",
)
def module_scaled_by_model_width() -> Subject:
    class Wrong(SelfAttention):
        def scores(self, x: Tensor) -> Tensor:
            return super().scores(x) * self.heads**-0.5

    return self_attention(Wrong, weights=True)


@fault(
    "weights-unscaled",
    "The returned attention map is not the one that was used",
    killed_by=("attention.returned-weights",),
    cause="not divided by sqrt(d_head)|that factor left out at heads.py",
)
def another_map() -> Subject:
    class Wrong(SelfAttention):
        def weights(self, scores: Tensor, mask: Tensor | None) -> Tensor:
            return super().weights(scores, mask)

    wrong = put(True, instead_of=False)
    return Subject(
        kind="self_attention",
        build=Wrong,
        forward=lambda m, x: m(x),
        projections=projections,
        weights=lambda m, x: (m.scores(x) * (m.width**0.5 if wrong else 1.0)).softmax(-1),
        declares={"causal": False, "positions": "none"},
    )


@fault(
    "KV01",
    "Values are taken from the keys",
    killed_by=("attention.projections-live", "attention.definition", "parameters.all-used"),
    cause="other rows than its own",
)
def values_from_keys() -> Subject:
    class Wrong(SelfAttention):
        def values(self, x: Tensor) -> Tensor:
            return self.k(x)

    return self_attention(Wrong)


@fault(
    "HD-index",
    "One head gets a bias by position",
    killed_by=("attention.head-permutation", "attention.head-gauge"),
    cause="permuting the heads",
)
def one_head_differs() -> Subject:
    class Wrong(SelfAttention):
        def merge(self, x: Tensor) -> Tensor:
            scale = 1 + 0.01 * torch.arange(self.heads * self.width, dtype=x.dtype)
            return super().merge(x) * scale

    return self_attention(Wrong)


class _Cross(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(config.d_model, config.num_heads, batch_first=True)


def attends(m: Any, x: Tensor, memory: Tensor, memory_mask: Tensor | None = None) -> Tensor:
    blocked = None if memory_mask is None else ~memory_mask
    return m.attention(x, memory, memory, key_padding_mask=blocked, need_weights=False)[0]


def _cross(forward: Any) -> Subject:
    return Subject(kind="cross_attention", build=_Cross, forward=put(forward, instead_of=attends))


@fault(
    "XA01",
    "Cross-attention attends to the decoder's own states",
    killed_by=("cross_attention.memory-matters",),
    cause="of the memory changes no output",
)
def attends_to_itself() -> Subject:
    return _cross(lambda m, x, memory: m.attention(x, x, x, need_weights=False)[0])


@fault(
    "XA07",
    "Relative bias applied in cross-attention though the model has none",
    killed_by=("cross_attention.memory-permutation",),
    cause="permuting the memory",
)
def biased_memory() -> Subject:
    def forward(m: Any, x: Tensor, memory: Tensor) -> Tensor:
        bias = -0.1 * (torch.arange(x.shape[1])[:, None] - torch.arange(memory.shape[1])).abs().to(x.dtype)
        return m.attention(x, memory, memory, attn_mask=bias, need_weights=False)[0]

    return _cross(forward)


@fault(
    "XA04",
    "Wrong side's mask used in cross-attention",
    killed_by=("padding.content-irrelevant",),
    cause="the mask is not applied to them",
)
def mask_of_the_wrong_side() -> Subject:
    def forward(m: Any, x: Tensor, memory: Tensor, memory_mask: Tensor | None = None) -> Tensor:
        return m.attention(x, memory, memory, need_weights=False)[0]  # the mask of x is all True, and so none

    return _cross(forward)


@fault(
    "XA02",
    "Cross-attention layers absent",
    killed_by=("cross_attention.memory-matters", "parameters.exact-count"),
    cause="cross-attention",
)
def without_cross_attention() -> Subject:
    class Silent(nn.Module):
        def forward(self, x: Tensor, memory: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
            return torch.zeros_like(x), None

    def remove(built: nn.Module) -> None:
        for layer in built.decoder.layers:
            layer.cross_attention = Silent()

    facts = {"bias": True, "norm": "layer", "activation": "relu", "norm_placement": "pre", "tied": False}
    return model(remove, facts, architecture="encoder_decoder")


@fault(
    "SC02-model",
    "A whole model divides by sqrt(d_model) instead of sqrt(d_head)",
    killed_by=("attention.model-scale",),
    cause="1/sqrt(d_model)",
)
def model_scaled_by_its_width() -> Subject:
    class Wrong(SelfAttention):
        def scores(self, x: Tensor) -> Tensor:
            return self.split(self.q(x)) @ self.split(self.k(x)).transpose(-2, -1) * x.shape[-1] ** -0.5

        def weights(self, scores: Tensor, mask: Tensor | None) -> Tensor:
            return torch.softmax(scores, dim=-1)

    return Subject(kind="layer", build=put_class(Wrong), forward=lambda m, x: x + m(x), declares={"causal": False})

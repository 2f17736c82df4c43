"""Faults of scaled dot-product attention: the scale, the softmax, masks, grouped heads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from veriformer.properties.subject.sizes import DrawnConfig
from veriformer.properties.subject.subject import Subject
from veriformer.tests.mutants import fault
from veriformer.tests.mutants.mending import put
from veriformer.tests.mutants.parts import SelfAttention, attention, masked, self_attention


def right(
    model: Any, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None = None, causal: bool = False
) -> Tensor:
    """Return attention as it is defined; a causal mask is aligned to the last key."""
    allow = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool) if attention_mask is None else attention_mask
    if causal:
        allow = allow & torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
    key, value = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    return masked(q @ key.transpose(-2, -1) * q.shape[-1] ** -0.5, allow) @ value


@fault(
    "SC01",
    "Missing 1/sqrt(d_k)",
    killed_by=(
        "attention.definition",
        "attention.score-variance",
        "attention.kernel-average",
        "attention.hopfield-step",
    ),
    cause="no scaling",
)
def unscaled() -> Subject:
    return attention(lambda s, v, allow, d, h: masked(s, allow) @ v)


@fault(
    "SC02",
    "Divides by sqrt(d_model) instead of sqrt(d_head)",
    killed_by=("attention.definition", "attention.score-variance", "attention.hopfield-step"),
    cause="1/sqrt(d_model)",
)
def scaled_by_model_width() -> Subject:
    return attention(lambda s, v, allow, d, h: masked(s * (d * h) ** -0.5, allow) @ v)


@fault(
    "SC04",
    "Reciprocal confusion: divides by d^-1/2",
    killed_by=("attention.definition", "attention.score-variance"),
    cause="sqrt(d_head)",
)
def multiplied() -> Subject:
    return attention(lambda s, v, allow, d, h: masked(s / d**-0.5, allow) @ v)


@fault(
    "SC05",
    "Scaling applied twice",
    killed_by=("attention.definition", "attention.score-variance"),
    cause="scaled twice",
)
def scaled_twice() -> Subject:
    return attention(lambda s, v, allow, d, h: masked(s * d**-0.5 * d**-0.5, allow) @ v)


@fault(
    "SM01",
    "Softmax over the query axis instead of keys",
    killed_by=("attention.definition", "attention.key-shift", "attention.hard-limit", "attention.convexity"),
    cause="softmax over the queries",
)
def over_queries() -> Subject:
    return attention(
        lambda s, v, allow, d, h: (s * d**-0.5).masked_fill(~allow, -torch.inf).softmax(-2).nan_to_num(0.0) @ v
    )


@fault(
    "SM02",
    "Softmax jointly over heads and positions",
    killed_by=("attention.definition", "attention.value-linearity"),
    cause="heads and keys together",
)
def over_heads_and_keys() -> Subject:
    def combine(s: Tensor, v: Tensor, allow: Tensor, d: int, h: int) -> Tensor:
        joint = (s * d**-0.5).masked_fill(~allow, -torch.inf).transpose(1, 2).flatten(2)
        return joint.softmax(-1).unflatten(2, (h, -1)).transpose(1, 2) @ v

    return attention(combine)


@fault(
    "SM07",
    "Scale multiplied after softmax",
    killed_by=("attention.convexity", "attention.uniform-limit", "attention.definition"),
    cause="after the softmax",
)
def scaled_after() -> Subject:
    return attention(lambda s, v, allow, d, h: masked(s, allow) * d**-0.5 @ v)


@fault(
    "attention-count",
    "Normalised by the number of keys",
    killed_by=("attention.duplicate-keys", "attention.definition"),
    cause="instead of by their sum",
)
def normalised_by_count() -> Subject:
    return attention(lambda s, v, allow, d, h: (s * d**-0.5).exp() * allow / s.shape[-1] ** 2 @ v)


@fault(
    "attention-distance",
    "Scores are negative L1 distances",
    killed_by=("attention.orthogonal-gauge", "attention.definition"),
    cause="one orthogonal matrix",
)
def by_distance() -> Subject:
    def forward(model: Any, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        scores = -(q[..., :, None, :] - k[..., None, :, :]).abs().sum(dim=-1)
        allow = torch.ones(scores.shape[-2:], dtype=torch.bool) if attention_mask is None else attention_mask
        return masked(scores, allow) @ v

    return Subject(kind="attention", forward=put(forward, instead_of=right))


@fault(
    "attention-index",
    "The score depends on the index of the key",
    killed_by=("attention.key-value-permutation",),
    cause="permuting keys",
)
def by_index() -> Subject:
    return attention(lambda s, v, allow, d, h: masked(s * d**-0.5 + 0.1 * torch.arange(s.shape[-1]), allow) @ v)


@fault(
    "CM13",
    "Mask applied after softmax without renormalising",
    killed_by=("attention.masked-equals-removed", "attention.mask-semantics", "attention.convexity"),
    cause="after the softmax",
)
def masked_after() -> Subject:
    return attention(lambda s, v, allow, d, h: ((s * d**-0.5).softmax(-1) * allow) @ v)


@fault(
    "CM14",
    "Scores multiplied by the 0/1 mask before softmax (0 instead of -inf)",
    killed_by=("attention.masked-equals-removed", "attention.mask-semantics"),
    cause="set to 0 instead of -inf",
)
def masked_by_zero() -> Subject:
    return attention(lambda s, v, allow, d, h: (s * d**-0.5 * allow).softmax(-1) @ v)


@fault(
    "CM10",
    "0/1 mask passed to an additive-mask API",
    killed_by=("attention.masked-equals-removed", "attention.mask-semantics", "attention.uniform-limit"),
    cause="added to the scores as 0 and 1",
)
def mask_added() -> Subject:
    return attention(lambda s, v, allow, d, h: (s * d**-0.5 + allow.to(s.dtype)).softmax(-1) @ v)


@fault(
    "CM11",
    "Additive -inf mask passed to an API expecting 0/1 (equivalent in float64)",
    killed_by=("attention.mask-semantics",),
    cause="boolean mask",
)
def additive_taken_for_binary() -> Subject:
    def forward(model: Any, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        if attention_mask is not None:
            additive = torch.zeros_like(scores).masked_fill(~attention_mask, -1e4)
            scores = scores + (1 - additive) * -1e9
        return scores.softmax(-1) @ v

    return Subject(kind="attention", forward=put(forward, instead_of=right))


@fault(
    "PM07",
    "Finite mask constant too weak",
    killed_by=("attention.masked-equals-removed",),
    cause="a finite number",
)
def weak_constant() -> Subject:
    return attention(lambda s, v, allow, d, h: (s * d**-0.5 + (~allow) * -100.0).softmax(-1) @ v)


@fault(
    "PM14",
    "Padding mask sign/zero-test forgotten",
    killed_by=("attention.masked-equals-removed", "attention.mask-semantics"),
    cause="inverted",
)
def inverted() -> Subject:
    def forward(model: Any, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        return (scores.softmax(-1) if attention_mask is None else masked(scores, ~attention_mask)) @ v

    return Subject(kind="attention", forward=put(forward, instead_of=right))


@fault("PM01", "Fully masked row gives NaN output", killed_by=("attention.empty-row",), cause="attend to no key")
def empty_row() -> Subject:
    return attention(lambda s, v, allow, d, h: (s * d**-0.5).masked_fill(~allow, -torch.inf).softmax(-1) @ v)


@fault(
    "PM02",
    "NaN gradients for everyone although the bad row is dropped from the loss",
    killed_by=("attention.empty-row",),
    cause="one row may attend to no key",
)
def hidden_nan() -> Subject:
    def combine(s: Tensor, v: Tensor, allow: Tensor, d: int, h: int) -> Tensor:
        weights = (s * d**-0.5).masked_fill(~allow, -torch.inf).softmax(-1)
        return torch.nan_to_num(weights @ v)

    return attention(combine)


@fault(
    "CM07",
    "is_causal is top-left aligned: cached query sees only the first key",
    killed_by=("causality.alignment",),
    cause="aligned to the top left",
)
def top_left() -> Subject:
    def forward(
        model: Any, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None = None, causal: bool = False
    ) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=attention_mask, is_causal=causal)

    return Subject(kind="attention", forward=put(forward, instead_of=right))


@fault(
    "CM02-attention",
    "Diagonal masked too: token cannot attend to itself",
    killed_by=("causality.alignment",),
    cause="off by one",
)
def strict_diagonal() -> Subject:
    def forward(model: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
        scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        allow = torch.ones(scores.shape[-2:], dtype=torch.bool)
        return masked(scores, allow.tril(k.shape[2] - q.shape[2] - 1) if causal else allow) @ v

    return Subject(kind="attention", forward=put(forward, instead_of=right))


@fault(
    "CM17",
    "is_causal hint overrides the explicit mask",
    killed_by=("attention.mask-semantics",),
    cause="the mask is forgotten",
)
def flag_overrides_mask() -> Subject:
    def forward(
        model: Any, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None = None, causal: bool = False
    ) -> Tensor:
        given = None if causal else attention_mask
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=given, is_causal=causal)

    return Subject(kind="attention", forward=forward, declares={"causal_alignment": "top-left"})


@fault(
    "HD05",
    "GQA expands KV heads by tiling instead of repeat_interleave",
    killed_by=("attention.grouped-queries",),
    cause="tiled",
)
def tiled_groups() -> Subject:
    def forward(model: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        times = q.shape[1] // k.shape[1]
        return functional.scaled_dot_product_attention(q, k.repeat(1, times, 1, 1), v.repeat(1, times, 1, 1))

    return Subject(kind="attention", forward=put(forward, instead_of=right), declares={"grouped_queries": True})


class _Switch:
    manual = False


@contextmanager
def _manually() -> Iterator[None]:
    _Switch.manual = True
    try:
        yield
    finally:
        _Switch.manual = False


@fault(
    "CM04-backend",
    "Mask silently dropped on the manual path",
    killed_by=("attention.backend-agreement",),
    cause="without the mask",
)
def backend_without_mask() -> Subject:
    def forward(model: Any, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        given = None if _Switch.manual else attention_mask
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=given)

    return Subject(kind="attention", forward=put(forward, instead_of=right), backends={"manual": _manually})


class Paired(SelfAttention):
    """Self-attention under a mask of pairs."""

    def __init__(self, config: DrawnConfig, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__(config)
        self.change = change

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        scores = self.scores(x)
        if attention_mask is not None:
            allow = attention_mask if attention_mask.ndim == 3 else attention_mask[None]
            scores = scores.masked_fill(~self.change(allow)[:, None], -torch.inf)
        return self.o(self.merge(scores.softmax(-1).nan_to_num(0.0) @ self.split(self.v(x))))


def pairwise(change: Callable[[Tensor], Tensor]) -> Subject:
    """Return multi-head self-attention that takes pairwise masks `[T, S]` or `[B, T, S]`, changed by `change(mask)`."""
    change = put(change, instead_of=lambda allow: allow)
    return replace(self_attention(), build=lambda c: Paired(c, change), mask_forms=("pairwise",))


@fault(
    "CM-transposed",
    "A pairwise mask is read by columns",
    killed_by=("attention.pairwise-mask",),
    cause="transposed",
)
def by_columns() -> Subject:
    return pairwise(lambda allow: allow.transpose(-2, -1))


@fault("CM-inverted", "A pairwise mask is inverted", killed_by=("attention.pairwise-mask",), cause="inverted")
def inverted_pairs() -> Subject:
    return pairwise(lambda allow: ~allow)


@fault(
    "CM-first-sample",
    "The first sample's pairwise mask serves the whole batch",
    killed_by=("attention.pairwise-mask",),
    cause="does not obey its own",
)
def of_the_first_sample() -> Subject:
    return pairwise(lambda allow: allow[:1].expand_as(allow))

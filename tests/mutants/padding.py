"""Faults of padding masks, pooling and batches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from veriformer.properties.subject.sizes import DrawnConfig
from veriformer.properties.subject.subject import Subject
from veriformer.reference import model as reference_model
from veriformer.tests.mutants import fault
from veriformer.tests.mutants.mending import put
from veriformer.tests.mutants.parts import SelfAttention, layer, model, self_attention


def _layer(weights: Any) -> Subject:
    class Wrong(SelfAttention):
        def weights(self, scores: Tensor, mask: Tensor | None) -> Tensor:
            return weights(super().weights, scores, mask)

    return layer(Wrong, causal=False, positions="none")


@fault(
    "PM-ignored",
    "The padding mask is accepted and not used",
    killed_by=("padding.content-irrelevant", "padding.amount-irrelevant", "padding.mask-matters"),
    cause="not applied",
)
def ignored() -> Subject:
    return _layer(lambda right, scores, mask: right(scores, None))


@fault(
    "PM13",
    "Padding mask applied to query rows rather than key columns",
    killed_by=("padding.content-irrelevant", "padding.amount-irrelevant"),
    cause="laid over the queries",
)
def rows_for_columns() -> Subject:
    def weights(right: Any, scores: Tensor, mask: Tensor | None) -> Tensor:
        return right(scores, None) if mask is None else right(scores, None) * mask[:, None, :, None]

    return _layer(weights)


@fault(
    "PM14-layer",
    "Padding mask inverted",
    killed_by=("padding.content-irrelevant", "padding.all-ones-mask"),
    cause="inverted",
)
def inverted() -> Subject:
    return _layer(lambda right, scores, mask: right(scores, None if mask is None else ~mask))


@fault(
    "PM07-layer",
    "Finite mask constant too weak",
    killed_by=("padding.content-irrelevant",),
    cause="too little",
)
def weak() -> Subject:
    def weights(right: Any, scores: Tensor, mask: Tensor | None) -> Tensor:
        return right(scores if mask is None else scores + (~mask[:, None, None, :]) * -10.0, None)

    return _layer(weights)


@fault(
    "PM17",
    "Bitwise NOT on an integer mask: every key counts as blocked",
    killed_by=("padding.all-ones-mask", "padding.mask-matters"),
    cause="not applied",
)
def integer_not() -> Subject:
    def weights(right: Any, scores: Tensor, mask: Tensor | None) -> Tensor:
        blocked = None if mask is None else (~mask.long()).bool()
        return right(scores if blocked is None else scores + blocked[:, None, None, :] * -1e4, None)

    return _layer(lambda right, scores, mask: weights(right, scores * (1.0 if mask is None else 0.5), mask))


@fault(
    "PM16",
    "Fast path assumes left-aligned masks where gradients are off",
    killed_by=("padding.content-irrelevant",),
    cause="this one alone",
)
def fast_path() -> Subject:
    def weights(right: Any, scores: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None and not torch.is_grad_enabled():
            mask = torch.arange(mask.shape[1])[None] < mask.sum(dim=1, keepdim=True) + 1
        return right(scores, mask)

    return _layer(weights)


@fault(
    "PM-empty",
    "One empty sample switches the mask off for the whole batch",
    killed_by=("padding.fully-padded-row",),
    cause="another sample of the batch is all padding",
)
def one_empty_for_all() -> Subject:
    def weights(right: Any, scores: Tensor, mask: Tensor | None) -> Tensor:
        return right(scores * (0.5 if mask is not None and not bool(mask.any(dim=1).all()) else 1.0), mask)

    return _layer(weights)


@fault("PM08", "Left padding with arange position ids", killed_by=("padding.left",), cause="positions count padding")
def arange_positions() -> Subject:
    class Wrong(reference_model.Decoder):
        def with_weights(self, tokens: Any = None, attention_mask: Any = None, **given: Any) -> Any:
            positions = torch.arange(tokens.shape[1])[None].expand(len(tokens), -1)
            x = self.embedding(tokens, None, positions)
            hidden, weights = reference_model.run_layers(self.stack, x, attention_mask, positions)
            return self.output(hidden), weights

    def change(built: nn.Module) -> None:
        built.__class__ = Wrong

    return model(change, {"padding_side": "both"}, architecture="decoder", positions="learned")


@fault(
    "PM10",
    "Mean pooling averages padding positions",
    killed_by=("padding.pooling", "padding.amount-irrelevant"),
    cause="the mean over all",
)
def mean_over_padding() -> Subject:
    class Mean(nn.Module):
        def forward(self, extras: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
            return tokens.mean(dim=1)

    def change(built: nn.Module) -> None:
        built.pooling = Mean()

    return model(change, architecture="classifier", positions="none")


@fault(
    "HD04",
    "batch_first mismatch: attention runs over the batch",
    killed_by=("batch.independence", "batch.permutation"),
    cause="over the batch",
)
def over_the_batch() -> Subject:
    class Wrong(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(config.d_model, config.num_heads, batch_first=False)

        def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            mixed = self.attention(x, x, x, need_weights=False)[0]
            return x + mixed * (1 + torch.arange(len(x), dtype=x.dtype))[:, None, None]

    return layer(Wrong, causal=False, positions="other")


@fault(
    "PE07",
    "PE indexed by batch instead of time",
    killed_by=("batch.independence", "batch.permutation", "positions.order-matters", "permutation.broken-by-positions"),
    cause="place in the batch",
)
def positions_by_sample() -> Subject:
    class Wrong(nn.Module):
        def forward(self, x: Tensor, positions: Tensor) -> Tensor:
            from veriformer.reference.positions import sinusoidal

            return x + sinusoidal(torch.arange(len(x)), x.shape[-1]).to(x.dtype)[:, None]

    def change(built: nn.Module) -> None:
        built.embedding.positions = Wrong()

    return model(change, architecture="encoder")


@fault(
    "PM06",
    "The mask's fill value does not fit float16, so that a masked forward raises there",
    killed_by=("numerics.precision-ladder",),
    cause="overflow",
)
def fill_of_another_dtype() -> Subject:
    fill = put(-1e9, instead_of=-1e4)

    class Filled(SelfAttention):
        def weights(self, scores: Tensor, mask: Tensor | None) -> Tensor:
            if mask is not None:
                scores = scores.masked_fill(~mask[:, None, None, :], fill)
            return scores.softmax(dim=-1)

    return self_attention(Filled, empty_row="mean")


@fault(
    "RB09",
    "Windows are padded behind the mask, so that the zeros of an incomplete window are seen as keys",
    killed_by=("padding.amount-irrelevant",),
    cause="the positions of an incomplete last part",
)
def unmasked_rest() -> Subject:
    seen = put(True, instead_of=False)

    class Windows(nn.Module):
        """Attention inside windows of four positions; the last one is filled up with zeros."""

        def __init__(self, config: DrawnConfig) -> None:
            super().__init__()
            self.inner = SelfAttention(config)

        def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            batch, length, width = x.shape
            rest = -length % 4
            mask = torch.ones(batch, length, dtype=torch.bool) if attention_mask is None else attention_mask
            mask = torch.nn.functional.pad(mask, (0, rest), value=seen)
            windows = torch.nn.functional.pad(x, (0, 0, 0, rest)).reshape(-1, 4, width)
            output = self.inner(windows, mask.reshape(-1, 4)).reshape(batch, -1, width)
            return x + output[:, :length]

    return Subject(
        kind="layer",
        build=Windows,
        forward=lambda m, x, attention_mask=None: m(x, attention_mask),
        declares={"causal": False, "positions": "other", "sparse": True, "structure": "other", "padding_side": "right"},
    )

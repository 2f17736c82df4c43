"""Canaries: known-broken models that go through the engine before the user's, to prove that this run can fail.

A run whose engine lets one pass says nothing about anybody's model: it is void. To add a canary, add one row to
`CANARIES`; every kind of subject has one at least.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from veriformer.properties.subject.subject import Subject

Break = Callable[[Subject], Subject]


@dataclass(frozen=True)
class Canary:
    """A right model of the reference with one thing broken.

    Attributes:
        name: what is broken.
        kind: of subject; it is sent where the run judges one of this kind.
        model: shipped subject that it is made of.
        noticed_by: properties of which each must notice; the first that the run has is asked.
        broken: makes it of the right one.
    """

    name: str
    kind: str
    model: str
    noticed_by: tuple[str, ...]
    broken: Break


def _output(change: Callable[..., Any]) -> Break:
    """Return what changes the output by `change(output, *inputs)`."""

    def broken(subject: Subject) -> Subject:
        right = subject.forward
        assert right is not None
        return replace(subject, forward=lambda m, *args, **kwargs: change(right(m, *args, **kwargs), *args), embed=None)

    return broken


def _unmasked(subject: Subject) -> Subject:
    right = subject.forward
    assert right is not None

    def forward(m: Any, *args: Any, attention_mask: Any = None, source_mask: Any = None, target_mask: Any = None,
                memory_mask: Any = None, **kwargs: Any) -> Any:  # fmt: skip
        return right(m, *args, **kwargs)

    return replace(subject, forward=forward, embed=None)


def _ahead(output: Tensor, *inputs: Any) -> Tensor:
    return output + torch.cat([output[:, 1:], output[:, -1:]], dim=1)


def _rolled(output: Tensor, *inputs: Any) -> Tensor:
    return output + output.roll(1, dims=0)


def _spread(output: Tensor, *inputs: Any) -> Tensor:
    return output + 8 * output.mean(dim=1, keepdim=True)


def _ramp(output: Tensor, axis: int) -> Tensor:
    return torch.arange(1, output.shape[axis] + 1, device=output.device)[:, None].to(output.dtype)


_FUTURE = ("causality.no-future-influence", "causality.prefix-consistency", "causality.no-future-gradient")
_PADDING = ("padding.content-irrelevant", "padding.amount-irrelevant")
_BATCH = ("batch.independence", "batch.permutation")
_ORDER = ("permutation.equivariance",)

CANARIES: list[Canary] = [
    Canary("softmax without its sum", "softmax", "softmax",
           ("softmax.simplex", "softmax.masked-is-zero", "softmax.no-overflow", "softmax.axis", "softmax.accuracy"),
           _output(lambda out, scores, *rest: out * 3)),
    Canary("attention multiplied by a constant", "attention", "attention",
           ("attention.definition", "attention.convexity", "attention.masked-equals-removed",
            "attention.mask-semantics", "attention.uniform-limit", "causality.alignment"),
           _output(lambda out, *inputs: out * 3)),
    Canary("self-attention that reads the next token", "self_attention", "causal-heads", _FUTURE, _output(_ahead)),
    Canary("self-attention that mixes the samples of a batch", "self_attention", "multi-head", _BATCH,
           _output(_rolled)),
    Canary("self-attention with an output three times as large", "self_attention", "multi-head",
           ("attention.definition", "attention.head-decomposition"),
           _output(lambda out, *inputs: 3 * out)),
    Canary("cross-attention without its memory", "cross_attention", "cross-attention",
           ("cross_attention.memory-matters", "attention.definition", "attention.projections-live"),
           _output(lambda out, x, *rest: x)),
    Canary("cross-attention that mixes the samples of a batch", "cross_attention", "cross-attention", _BATCH,
           _output(_rolled)),
    Canary("sinusoidal positions three times as large", "positions", "sinusoidal",
           ("sinusoidal.definition", "sinusoidal.bounded", "sinusoidal.inner-product"),
           _output(lambda out, *inputs: 3 * out)),
    Canary("rotary positions that stretch", "rotary", "rotary",
           ("rotary.isometry", "rotary.identity", "rotary.composition"), _output(lambda out, *inputs: 3 * out)),
    Canary("a relative bias that depends on the place", "position_bias", "alibi",
           ("position-bias.relative", "alibi.slopes"),
           _output(lambda out, *inputs: out + _ramp(out, -2) * _ramp(out, -1).T)),
    Canary("a norm that mixes tokens", "norm", "layer-norm",
           ("norm.per-token", "norm.definition", "norm.statistics"), _output(_spread)),
    Canary("a feed-forward network that mixes tokens", "feed_forward", "feed-forward",
           ("ffn.position-wise",), _output(_spread)),
    Canary("a layer that reads the next token", "layer", "layer-causal", _FUTURE, _output(_ahead)),
    Canary("a layer that mixes the samples of a batch", "layer", "layer-pre", _BATCH, _output(_rolled)),
    Canary("a layer without residual connections", "layer", "layer-pre",
           ("residual.identity", "residual.placement", "residual.jacobian"), _output(lambda out, x, *rest: out - x)),
    Canary("an encoder that reads its padding", "encoder", "encoder", _PADDING, _unmasked),
    Canary("an encoder that mixes the samples of a batch", "encoder", "encoder", _BATCH, _output(_rolled)),
    Canary("an encoder without order that has one", "encoder", "encoder-none", _ORDER,
           _output(lambda out, *inputs: out * _ramp(out, 1))),
    Canary("a decoder that reads the next token", "decoder", "decoder-rotary", _FUTURE, _output(_ahead)),
    Canary("a decoder that mixes the samples of a batch", "decoder", "decoder-rotary", _BATCH, _output(_rolled)),
    Canary("an encoder-decoder that reads the next token", "encoder_decoder", "encoder-decoder", _FUTURE,
           _output(_ahead)),
    Canary("a classifier that reads its padding", "classifier", "classifier-mean", _PADDING, _unmasked),
    Canary("a classifier that mixes the samples of a batch", "classifier", "classifier-mean", _BATCH, _output(_rolled)),
    Canary("a loss three times as large", "loss", "loss", ("loss.definition", "loss.accumulation"),
           _output(lambda out, *inputs: 3 * out)),
    Canary("a masking that asks for every token", "masking", "masking", ("masking.mlm",),
           _output(lambda out, tokens, *rest: (out[0], tokens))),
    Canary("a schedule that is one step late", "schedule", "noam", ("schedule.warmup",),
           _output(lambda out, step, *rest: out * (step + 1) / max(step, 1))),
    Canary("a cosine schedule that rises again", "schedule", "cosine", ("schedule.cosine",),
           _output(lambda out, step, *rest: out * (1 + step / 50))),
    Canary("a linear schedule that rises again", "schedule", "linear", ("schedule.linear",),
           _output(lambda out, step, *rest: out * (1 + step / 50))),
    Canary("decay for every parameter", "parameter_groups", "parameter-groups", ("schedule.decay-groups",),
           _output(lambda out, *inputs: [{**group, "weight_decay": 0.1} for group in out])),
    Canary("a tokenizer that drops its last token", "tokenizer", "byte-pairs",
           ("tokenizer.round-trip", "tokenizer.bpe-merges"), _output(lambda out, text, *rest: out[:-1])),
    Canary("a tokenizer that counts its calls", "tokenizer", "byte-pairs", ("tokenizer.deterministic",),
           lambda subject: _counting(subject)),
]  # fmt: skip
"""Every canary; plug-ins add theirs."""


def _counting(subject: Subject) -> Subject:
    right, calls = subject.forward, [0]
    assert right is not None

    def forward(m: Any, text: str) -> list[int]:
        calls[0] += 1
        return [*right(m, text), *([calls[0] % 7] if text else [])]

    return replace(subject, forward=forward)

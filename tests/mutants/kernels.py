"""Faults of kernels and of what stands around them: sums over the wrong side, forgotten factors, dead halves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from veriformer.properties.adapters.reference_models import forward_pair
from veriformer.properties.subject.sizes import DrawnConfig
from veriformer.properties.subject.subject import Subject
from veriformer.reference.model import build
from veriformer.tests.mutants import fault
from veriformer.tests.mutants.mending import put
from veriformer.tests.mutants.parts import sized


def _softmax(scores: Tensor, allow: Tensor) -> Tensor:
    return scores.masked_fill(~allow, -torch.inf).softmax(-1).nan_to_num(0.0)


class _Kernel(nn.Module):
    """Attention in the open, to be changed by overriding one method; no parameters."""

    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        self.rate = rate

    def scores(self, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
        scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        return scores + mask if mask is not None and mask.is_floating_point() else scores

    def weights(self, scores: Tensor, allow: Tensor) -> Tensor:
        return _softmax(scores, allow)

    def dropped(self, weights: Tensor) -> Tensor:
        return F.dropout(weights, self.rate, self.training)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None = None, causal: bool = False
    ) -> Tensor:
        k, v = (self.grown(x, q.shape[1] // x.shape[1]) for x in (k, v))
        scores = self.scores(q, k, attention_mask)
        boolean = None if attention_mask is None or attention_mask.is_floating_point() else attention_mask
        allow = torch.ones_like(scores, dtype=torch.bool) if boolean is None else boolean.expand(scores.shape)
        allow = allow & self.behind(*scores.shape[-2:]) if causal else allow
        return self.dropped(self.weights(scores, allow)) @ v

    def behind(self, queries: int, keys: int) -> Tensor:
        return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)

    def grown(self, x: Tensor, repeats: int) -> Tensor:
        return x.repeat_interleave(repeats, 1)


def _kernel(wrong: type[_Kernel], **given: Any) -> Subject:
    made = put(wrong, instead_of=_Kernel)
    return Subject(
        kind="attention",
        build=lambda c: made(c.dropout),
        forward=lambda m, q, k, v, attention_mask=None, causal=False: m(q, k, v, attention_mask, causal),
        declares={"empty_row": "zeros", "grouped_queries": True},
        **given,
    )


@fault(
    "KN-maximum",
    "The maximum that is taken off the scores is that of all keys, those that the mask hides among them",
    killed_by=("attention.masked-equals-removed",),
    cause="",
)
def maximum_of_all() -> Subject:
    class Kernel(_Kernel):
        def weights(self, scores: Tensor, allow: Tensor) -> Tensor:
            e = (scores - scores.detach().amax(-1, keepdim=True)).exp().masked_fill(~allow, 0.0)
            total = e.sum(-1, keepdim=True)
            return e / total.masked_fill(total == 0, 1.0)

    return _kernel(Kernel)


@fault(
    "KN-bias-scaled",
    "A float mask is added before the scores are scaled, so that its numbers are scaled too",
    killed_by=("attention.mask-semantics",),
    cause="added before the scores are scaled",
)
def bias_scaled() -> Subject:
    class Kernel(_Kernel):
        def scores(self, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
            scores = q @ k.transpose(-2, -1)
            if mask is not None and mask.is_floating_point():
                scores = scores + mask
            return scores * q.shape[-1] ** -0.5

    return _kernel(Kernel, mask_forms=("pairwise", "additive"))


@fault(
    "KN-causal-block",
    "Keys are taken eight at a time, and the causal mask of a block is made from the place in the block",
    killed_by=("causality.alignment",),
    cause="without the block's offset",
)
def causal_block() -> Subject:
    class Kernel(_Kernel):
        def behind(self, queries: int, keys: int) -> Tensor:
            return torch.arange(keys) % 8 <= torch.arange(queries)[:, None] + keys - queries

    return _kernel(Kernel)


class _Repeat(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, repeats: int) -> Tensor:  # type: ignore[override]
        ctx.repeats = repeats
        return x.repeat_interleave(repeats, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient.unflatten(1, (ctx.repeats, -1)).sum(1), None


@fault(
    "KN-grouped-backward",
    "The gradients of shared keys and values are summed over the wrong side of the groups",
    killed_by=("attention.grouped-queries",),
    cause="in the backward of _Repeat",
)
def wrong_groups_backward() -> Subject:
    class Kernel(_Kernel):
        def grown(self, x: Tensor, repeats: int) -> Tensor:
            return x if repeats == 1 else _Repeat.apply(x, repeats)  # type: ignore[no-any-return, no-untyped-call]

    return _kernel(Kernel)


@fault(
    "KN-dropout",
    "A kernel drops weights and does not scale those that it keeps",
    killed_by=("dropout.mean",),
    cause="not scaled by 1 / (1 - p)",
)
def dropout_unscaled() -> Subject:
    class Kernel(_Kernel):
        def dropped(self, weights: Tensor) -> Tensor:
            return weights * (torch.rand_like(weights) >= self.rate) if self.training else weights

    return _kernel(Kernel)


@fault(
    "XA-queries-share",
    "Cross-attention takes its softmax over the queries",
    killed_by=("cross_attention.memory-matters",),
    cause="shared out among queries",
)
def softmax_over_queries() -> Subject:
    axis = put(-2, instead_of=-1)

    class Cross(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.q, self.kv, self.o = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(width, width)

        def forward(self, x: Tensor, memory: Tensor) -> Tensor:
            k, v = self.kv(memory).chunk(2, -1)
            scores = self.q(x) @ k.transpose(-2, -1) * x.shape[-1] ** -0.5
            return self.o(scores.softmax(axis) @ v)  # type: ignore[no-any-return]

    return Subject(
        kind="cross_attention", build=lambda c: Cross(c.d_model), forward=lambda m, x, memory: m(x, memory),
        domain={"num_heads": [1]}, declares={"structure": "other"},
    )  # fmt: skip


@fault(
    "XA-causal",
    "The causal mask is laid over the memory",
    killed_by=("cross_attention.memory-matters",),
    cause="causal mask is laid over the memory",
)
def causal_memory() -> Subject:
    hides = put(True, instead_of=False)

    class Cross(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.q, self.kv, self.o = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(width, width)

        def forward(self, x: Tensor, memory: Tensor) -> Tensor:
            k, v = self.kv(memory).chunk(2, -1)
            scores = self.q(x) @ k.transpose(-2, -1) * x.shape[-1] ** -0.5
            behind = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
            return self.o(_softmax(scores, behind | (not hides)) @ v)  # type: ignore[no-any-return]

    return Subject(
        kind="cross_attention", build=lambda c: Cross(c.d_model), forward=lambda m, x, memory: m(x, memory),
        domain={"num_heads": [1]}, declares={"structure": "other"},
    )  # fmt: skip


def _with_pairs(change: Callable[[nn.Module], None], **choices: Any) -> Subject:
    change = put(change, instead_of=lambda model: None)

    def make(config: DrawnConfig) -> nn.Module:
        model = build(sized(config, architecture="encoder_decoder", **choices))
        change(model)
        return model

    return Subject(
        kind="encoder_decoder", build=make, forward=forward_pair,
        declares={"positions": "sinusoidal", "padding_side": "both", **choices},
    )  # fmt: skip


@fault(
    "FF-dead-half",
    "SwiGLU multiplies the gate by itself, and the other half of the matrix does nothing",
    killed_by=("parameters.all-used",),
    cause="computed and not used",
)
def dead_half() -> Subject:
    own = put(True, instead_of=False)

    class Gated(nn.Module):
        def __init__(self, config: DrawnConfig) -> None:
            super().__init__()
            self.both = nn.Linear(config.d_model, 2 * config.d_ff, bias=False)
            self.down = nn.Linear(config.d_ff, config.d_model, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            gate, up = self.both(x).chunk(2, -1)
            return self.down(F.silu(gate) * (gate if own else up))  # type: ignore[no-any-return]

    return Subject(kind="feed_forward", build=Gated, forward=lambda m, x: m(x))


@fault(
    "IN05-drawn",
    "A table drawn at random is a plain tensor: it is not saved, and a model that is loaded has another one",
    killed_by=("parameters.registered",),
    cause="neither parameter nor buffer",
)
def plain_table() -> Subject:
    saved = put(False, instead_of=True)

    class Model(nn.Module):
        def __init__(self, config: DrawnConfig) -> None:
            super().__init__()
            self.tokens = nn.Embedding(config.vocab_size, config.d_model)
            table = torch.randn(config.max_len, config.d_model)
            self.table = nn.Parameter(table) if saved else table
            self.mix = nn.TransformerEncoderLayer(config.d_model, config.num_heads, config.d_ff, 0.0, batch_first=True)

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.tokens(tokens)
            return self.mix(x + self.table[: tokens.shape[1]].to(x))  # type: ignore[no-any-return]

    return Subject(
        kind="encoder", build=Model, forward=lambda m, tokens: m(tokens),
        declares={"causal": False, "positions": "learned", "stacked": False},
    )  # fmt: skip


@fault(
    "EM-one-side",
    "Embeddings are scaled on the source's side alone",
    killed_by=("init.embedding-scale",),
    cause="not scaled",
)
def one_side() -> Subject:
    def change(model: nn.Module) -> None:
        model.target_embedding.scale = 1.0  # type: ignore[union-attr]

    return _with_pairs(change, embedding_scale=True)

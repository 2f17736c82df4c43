"""Faults of order: sinks behind the mask, fillers behind the maximum, chunks rounded down, one part for two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from veriformer.properties.subject.sizes import DrawnConfig
from veriformer.properties.subject.subject import Subject
from veriformer.tests.mutants import fault
from veriformer.tests.mutants.mending import put

_WINDOW, _SINKS = 4, 2


class _Streaming(nn.Module):
    """Attention to the last keys and to the first ones."""

    def __init__(self, c: DrawnConfig, allowed: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.heads, self.allowed = c.num_heads, allowed
        self.qkv, self.out = nn.Linear(c.d_model, 3 * c.d_model, bias=False), nn.Linear(c.d_model, c.d_model)

    def forward(self, x: Tensor) -> Tensor:
        at = torch.arange(x.shape[1], device=x.device)
        past, near, first = at <= at[:, None], at > at[:, None] - _WINDOW, (at < _SINKS).expand(len(at), -1)
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.allowed(past, near, first))
        made: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return made


@fault(
    "CM-sinks-ahead",
    "The sinks are let in behind the causal mask, so that those before them see them, too",
    killed_by=("causality.no-future-influence",),
    cause="let in behind the causal mask",
)
def sinks_behind_the_mask() -> Subject:
    allowed: Callable[[Tensor, Tensor, Tensor], Tensor] = put(
        lambda past, near, first: past & near | first, instead_of=lambda past, near, first: past & (near | first)
    )
    return Subject(
        kind="self_attention", build=lambda c: _Streaming(c, allowed), forward=lambda m, x: m(x),
        declares={"causal": True, "window": _WINDOW, "sink_tokens": _SINKS, "positions": "none"},
    )  # fmt: skip


@fault(
    "SM-lanes-behind-maximum",
    "Rows are filled up to whole vectors with zeros behind the subtraction of the maximum, and the sum counts them",
    killed_by=("softmax.simplex",),
    cause="zeros behind the subtraction of the maximum",
)
def lanes_behind_the_maximum() -> Subject:
    fill: float = put(0.0, instead_of=float("-inf"))

    def softmax(m: Any, scores: Tensor, dim: int = -1) -> Tensor:
        x = scores.movedim(dim, -1)
        x = F.pad(x - x.amax(-1, keepdim=True), (0, -x.shape[-1] % 4), value=fill)
        weights = x.exp() / x.exp().sum(-1, keepdim=True)
        return weights[..., : scores.shape[dim]].movedim(-1, dim)

    return Subject(kind="softmax", forward=softmax)


class _Chunked(nn.Module):
    """A feed-forward network that goes over the sequence six tokens at a time."""

    def __init__(self, c: DrawnConfig, more: int) -> None:
        super().__init__()
        self.more, self.up, self.down = more, nn.Linear(c.d_model, c.d_ff), nn.Linear(c.d_ff, c.d_model)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] < 6:
            return self.made(x)
        out = torch.zeros_like(x)
        for number in range((x.shape[1] + self.more) // 6):
            out[:, 6 * number : 6 * number + 6] = self.made(x[:, 6 * number : 6 * number + 6])
        return out

    def made(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.relu(self.up(x)))
        return y


@fault(
    "FF-chunks-rounded-down",
    "The number of chunks is rounded down, and what is left behind the last of them is never computed",
    killed_by=("ffn.position-wise",),
    cause="no multiple of 6",
)
def chunks_rounded_down() -> Subject:
    more: int = put(0, instead_of=5)
    return Subject(
        kind="feed_forward", build=lambda c: _Chunked(c, more), forward=lambda m, x: m(x),
        declares={"activation": "relu"},
    )  # fmt: skip


class _Through(Function):
    """Rounds to 8 bits; the gradient passes within a range."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, step: Tensor, levels: int) -> Tensor:
        ctx.save_for_backward(weight.abs() <= levels * step)
        return (weight / step).round().clamp(-127, 127) * step

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor, None, None]:
        (inside,) = ctx.saved_tensors
        return given[0] * inside, None, None


class _Rounded(nn.Module):
    """A feed-forward network that is trained through the rounding of its weights."""

    def __init__(self, c: DrawnConfig, levels: int) -> None:
        super().__init__()
        self.levels, self.up, self.down = levels, nn.Linear(c.d_model, c.d_ff), nn.Linear(c.d_ff, c.d_model)

    def of(self, weight: Tensor) -> Tensor:
        step = weight.detach().abs().amax(1, keepdim=True) / 127
        made: Tensor = _Through.apply(weight, step, self.levels)
        return made

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(F.linear(x, self.of(self.up.weight), self.up.bias))
        return F.linear(y, self.of(self.down.weight), self.down.bias)


@fault(
    "TR-narrow-range",
    "A straight-through estimator passes the gradient within one step of zero, where it is to do so within 127",
    killed_by=("training.parameters-move",),
    cause="within a range that is too narrow",
)
def gradients_within_one_step() -> Subject:
    levels: int = put(1, instead_of=127)
    return Subject(
        kind="feed_forward", build=lambda c: _Rounded(c, levels), forward=lambda m, x: m(x),
        declares={"activation": "relu", "quantised": True},
    )  # fmt: skip


class _OnePartTwice(nn.Module):
    """torch's Transformer, whose decoder may attend to the memory by its attention to itself."""

    def __init__(self, c: DrawnConfig, memory_of: Callable[[Any], nn.Module]) -> None:
        super().__init__()
        d, n = c.d_model, c.num_layers
        self.embed = nn.ModuleList(nn.Embedding(c.vocab_size, d) for _ in range(2))
        self.core = nn.Transformer(d, c.num_heads, n, n, c.d_ff, dropout=0.0, batch_first=True)
        self.head = nn.Linear(d, c.vocab_size, bias=False)
        for layer in self.core.decoder.layers:
            layer.multihead_attn = memory_of(layer)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        ahead = torch.ones(2 * (target.shape[1],), dtype=torch.bool, device=target.device).triu(1)
        y: Tensor = self.head(self.core(self.embed[0](source), self.embed[1](target), tgt_mask=ahead))
        return y


@fault(
    "IN-one-attention-for-two",
    "Every layer of a decoder attends to itself and to the memory by one module, with one set of weights",
    killed_by=("parameters.exact-count",),
    cause="are one module with one set of weights",
)
def one_attention_for_two() -> Subject:
    memory_of: Callable[[Any], nn.Module] = put(
        lambda layer: layer.self_attn, instead_of=lambda layer: layer.multihead_attn
    )
    return Subject(
        kind="encoder_decoder", build=lambda c: _OnePartTwice(c, memory_of),
        forward=lambda m, source, target: m(source, target),
        declares={"positions": "none", "norm": "layer", "norm_placement": "post", "final_norm": True,
                  "activation": "relu", "bias": True, "structure": "textbook"},
    )  # fmt: skip


class _KeptMemory(nn.Module):
    """Cross-attention that keeps the keys and values of a memory while nothing is trained."""

    def __init__(self, c: DrawnConfig, may_keep: Callable[[], bool]) -> None:
        super().__init__()
        self.heads, self.may_keep, self.kept = c.num_heads, may_keep, None
        self.q, self.kv = (nn.Linear(c.d_model, n * c.d_model, bias=False) for n in (1, 2))
        self.kept: Tensor | None

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        made = self.kept
        if made is None or made.shape[1:3] != memory.shape[:2] or torch.is_grad_enabled() or not self.may_keep():
            made = self.kv(memory).unflatten(-1, (2, -1)).movedim(2, 0)
            self.kept = None if torch.is_grad_enabled() else made
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in (self.q(x), *made))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


@fault(
    "RP-kept-of-another-memory",
    "Without gradients the keys and values of a memory are used again for any other of its shape",
    killed_by=("parameters.registered",),
    cause="was made of the first inputs",
)
def kept_of_another_memory() -> Subject:
    may_keep: Callable[[], bool] = put(lambda: True, instead_of=lambda: False)
    return Subject(
        kind="cross_attention", build=lambda c: _KeptMemory(c, may_keep), forward=lambda m, x, memory: m(x, memory),
        declares={"structure": "other"},
    )  # fmt: skip


class _Anew(Function):
    """Runs a layer and keeps its input alone; the backward runs it anew."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Tensor], given: tuple[Any, ...], x: Tensor, *weights: Tensor) -> Tensor:
        ctx.run, ctx.given, ctx.weights = run, given, weights
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x, *given[:1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *up: Tensor) -> tuple[Tensor | None, ...]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            made = ctx.run(x, *ctx.given[1:])
        return None, None, *torch.autograd.grad(made, [x, *ctx.weights], up[0])


class _Recomputed(nn.Module):
    """Attention to a sequence under a mask, computed anew in the backward."""

    def __init__(self, c: DrawnConfig, kept: Callable[[Any], tuple[Any, ...]]) -> None:
        super().__init__()
        self.heads, self.kept = c.num_heads, kept
        self.qkv, self.out = nn.Linear(c.d_model, 3 * c.d_model), nn.Linear(c.d_model, c.d_model)

    def run(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=None if mask is None else mask[:, None, None])
        made: Tensor = x + self.out(y.transpose(1, 2).flatten(2))
        return made

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        made: Tensor = _Anew.apply(self.run, (mask, *self.kept(mask)), x, *self.parameters())
        return made


@fault(
    "PM-anew-without-mask",
    "The backward computes a layer anew and does not give it the padding mask: outputs are right, gradients are not",
    killed_by=("padding.content-irrelevant",),
    cause="those of a call without a mask",
)
def anew_without_the_mask() -> Subject:
    kept: Callable[[Any], tuple[Any, ...]] = put(lambda mask: (), instead_of=lambda mask: (mask,))
    return Subject(
        kind="layer", build=lambda c: _Recomputed(c, kept),
        forward=lambda m, x, attention_mask=None: m(x, attention_mask),
        declares={"structure": "other", "once_differentiable": True, "norm": "none", "empty_row": "nan"},
    )  # fmt: skip

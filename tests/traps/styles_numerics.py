"""Right implementations whose arithmetic is unusual: narrow constants, in-place steps, recomputation, noise."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from veriformer.properties.subject.sizes import DrawnConfig
from veriformer.properties.subject.subject import Subject
from veriformer.tests.mutants.parts import SelfAttention, masked, self_attention
from veriformer.tests.traps import trap


class _Encoder(nn.Module):
    """Embeddings, one layer of attention around a residual, a norm."""

    def __init__(self, config: DrawnConfig, padding_idx: int | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.d_model, padding_idx=padding_idx)
        self.attention = SelfAttention(config)
        self.norm = nn.LayerNorm(config.d_model)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens)

    def forward(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.embed(tokens)
        return self.norm(x + self.attention(x, attention_mask))


def _encoder(build: Any, **facts: Any) -> Subject:
    return Subject(
        kind="encoder",
        build=build,
        forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
        declares={"causal": False, "positions": "none", **facts},
    )


def _feed_forward(cls: type[nn.Module], **facts: Any) -> Subject:
    return Subject(
        kind="feed_forward",
        build=lambda c: cls(c.d_model, c.d_ff, c.dropout),
        forward=lambda m, x: m(x),
        declares={"bias": True, **facts},
    )


@trap("style-padding-row", "The row of padding_idx has no gradient though the output depends on it")
def padding_row() -> Subject:
    return _encoder(lambda c: _Encoder(c, padding_idx=0), padding_idx=0)


@trap(
    "style-padding-row-functional",
    "F.embedding is told of the padding row, no module is",
    "torch.nn.functional.embedding",
)
def functional_padding_row() -> Subject:
    class Model(_Encoder):
        def embed(self, tokens: Tensor) -> Tensor:
            return functional.embedding(tokens, self.embedding.weight, padding_idx=0)

    return _encoder(Model)


@trap("style-narrow-scale", "The scale is torch.sqrt(torch.FloatTensor([d_head]))", "bentrevett/pytorch-seq2seq")
def narrow_scale() -> Subject:
    class Narrow(SelfAttention):
        def __init__(self, config: DrawnConfig) -> None:
            super().__init__(config)
            self.scale = torch.sqrt(torch.FloatTensor([self.width]))  # stays in float32 whatever the model's dtype is

        def scores(self, x: Tensor) -> Tensor:
            products = self.split(self.q(x)) @ self.split(self.k(x)).transpose(-2, -1)
            return products / self.scale.to(x.device, torch.promote_types(x.dtype, torch.float32)).to(x.dtype)

    return self_attention(Narrow, weights=True)


@trap("style-kernel-in-float32", "A kernel computes in float32 by itself and gives float32 back, autocast or not")
def kernel_in_float32() -> Subject:
    class Kernel(nn.Module):
        def forward(
            self, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None = None, causal: bool = False
        ) -> Tensor:
            wide = torch.float64 if q.dtype == torch.float64 else torch.float32
            scores = q.to(wide) @ k.to(wide).transpose(-2, -1) * q.shape[-1] ** -0.5  # autocast lowers this product
            allow = torch.ones(scores.shape[-2:], dtype=torch.bool) if attention_mask is None else attention_mask
            if causal:
                allow = allow & torch.ones(scores.shape[-2:], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
            return (masked(scores, allow).to(wide) @ v.to(wide)).to(q.dtype)

    return Subject(
        kind="attention",
        build=lambda c: Kernel(),
        forward=lambda m, q, k, v, attention_mask=None, causal=False: m(q, k, v, attention_mask, causal),
        declares={"empty_row": "zeros"},
    )


@trap("style-positions-in-place", "Positions are added in place to what the embedding returned", "karpathy/minGPT")
def positions_in_place() -> Subject:
    class Decoder(nn.Module):
        def __init__(self, config: DrawnConfig) -> None:
            super().__init__()
            self.embedding = nn.Embedding(config.vocab_size, config.d_model)
            self.positions = nn.Embedding(config.max_len, config.d_model)
            self.attention = SelfAttention(config)
            self.norm = nn.LayerNorm(config.d_model)
            self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
            nn.init.normal_(self.head.weight, std=0.02)

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embedding(tokens)
            x += self.positions(torch.arange(tokens.shape[1], device=tokens.device))
            a = self.attention
            hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
            weights = a.scores(x).masked_fill(hidden, -torch.inf).softmax(-1)
            return self.head(self.norm(x + a.o(a.merge(weights @ a.split(a.v(x))))))

    return Subject(
        kind="decoder",
        build=Decoder,
        forward=lambda m, tokens: m(tokens),
        declares={"causal": True, "positions": "learned", "max_len": 32, "beyond_max_len": "error"},
        domain={"max_len": (32,)},
    )


class _Network(nn.Module):
    """Two linear maps with an activation and dropout between them."""

    def __init__(self, width: int, inner: int, rate: float) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(width, inner), nn.Linear(inner, width), nn.Dropout(rate)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.drop(functional.relu(self.up(x))))


@trap("style-checkpointed", "In train mode the forward is computed again in the backward, dropout and all")
def checkpointed() -> Subject:
    class Checkpointed(_Network):
        def forward(self, x: Tensor) -> Tensor:
            if not self.training:
                return super().forward(x)
            return checkpoint(super().forward, x, use_reentrant=False)

    return _feed_forward(Checkpointed, activation="relu")


class _Scripted(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


@trap("style-scripted", "A ScriptModule: it cannot be pickled or hooked, and refuses inference mode")
def scripted() -> Subject:
    return Subject(
        kind="feed_forward",
        build=lambda c: torch.jit.script(_Scripted(c.d_model, c.d_ff)),
        forward=lambda m, x: m(x),
        declares={"activation": "relu", "bias": True},
    )


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a.sigmoid() * a * b

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        a, b = ctx.saved_tensors
        s = a.sigmoid()
        return gradient * b * s * (1 + a * (1 - s)), gradient * a * s


@trap("style-once-differentiable", "A backward that is marked once_differentiable, in a graph that goes on beside it")
def once() -> Subject:
    class Gated(nn.Module):
        def __init__(self, width: int, inner: int, rate: float) -> None:
            super().__init__()
            self.gate, self.up, self.down = nn.Linear(width, inner), nn.Linear(width, inner), nn.Linear(inner, width)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(_Product.apply(self.gate(x), self.up(x)))

    return _feed_forward(Gated, activation="swiglu")


class _Rescaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        size = x.square().mean(-1, keepdim=True).add(1e-6).rsqrt()
        ctx.save_for_backward(x, size.detach())
        return x * size

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        x, size = ctx.saved_tensors  # kept from the forward, as kernels do: free of x for a second derivative
        return size * (gradient - x * size.square() * (gradient * x).mean(-1, keepdim=True))


@trap("style-kept-statistics", "A backward from statistics that were kept: right once, silently wrong a second time")
def kept_statistics() -> Subject:
    class Normed(_Network):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(_Rescaled.apply(x))

    return _feed_forward(Normed, once_differentiable=True)


@trap("style-straight-through", "Weights are rounded to 255 levels, their gradient passes straight through")
def straight_through() -> Subject:
    class Rounded(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            step = self.weight.detach().abs().amax(1, keepdim=True) / 127
            rounded = (self.weight / step).round() * step
            return functional.linear(x, self.weight + (rounded - self.weight).detach(), self.bias)

    class Attention(SelfAttention):
        def __init__(self, config: DrawnConfig) -> None:
            super().__init__(config)
            self.q, self.k, self.v, self.o = (Rounded(config.d_model, config.d_model) for _ in range(4))

    return Subject(
        kind="self_attention",
        build=Attention,
        forward=lambda m, x, attention_mask=None: m(x, attention_mask),
        declares={"causal": False, "positions": "none", "bias": True, "quantised": True},
    )


@trap("style-log-sum-exp", "Softmax as exp(x - logsumexp(x)): large scores round in the exponent")
def log_sum_exp() -> Subject:
    def forward(model: Any, x: Tensor, dim: int = -1) -> Tensor:
        total = torch.logsumexp(x.to(torch.promote_types(x.dtype, torch.float32)), dim, keepdim=True)
        return (x - torch.where(total.isinf(), 0.0, total)).exp().to(x.dtype)

    return Subject(kind="softmax", forward=forward)


@trap("style-textbook-norm", "LayerNorm written out in the dtype of its input, its weights in a dict")
def textbook_norm() -> Subject:
    def forward(weights: Any, x: Tensor) -> Tensor:
        mean, variance = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
        gain, bias = (weights[name].to(x.dtype) for name in ("gain", "bias"))
        return gain * (x - mean) / torch.sqrt(variance + 1e-5) + bias

    return Subject(
        kind="norm",
        build=lambda c: {"gain": torch.ones(c.d_model), "bias": torch.zeros(c.d_model)},
        forward=forward,
        declares={"norm": "layer", "half_precision": False},
    )


@trap("style-fill-of-float32", "Scores are filled with -1e9, which float16 refuses: a ready-made instance")
def fill_of_float32() -> Subject:
    class Causal(SelfAttention):
        def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
            weights = self.scores(x).masked_fill(hidden, -1e9).softmax(-1)
            return self.o(self.merge(weights @ self.split(self.v(x))))

    config = DrawnConfig()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = Causal(config)
    return Subject(
        kind="self_attention",
        module=module,
        config=config,
        forward=lambda m, x: m(x),
        declares={"causal": True, "positions": "none", "bias": True},
    )


def _given_encoder(factor: float) -> Subject:
    """Return twelve pre-norm layers of torch's as an instance, every weight multiplied by a factor."""
    config = DrawnConfig(d_model=16, num_heads=2, d_ff=24, num_layers=12)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(16, 2, 24, 0.0, batch_first=True, norm_first=True)
        module = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False).eval()
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.ndim > 1:
                    nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
                parameter.mul_(factor)
    return Subject(
        kind="encoder",
        module=module,
        config=config,
        inputs="embeddings",
        forward=lambda m, x, attention_mask=None: m(
            x, src_key_padding_mask=None if attention_mask is None else ~attention_mask
        ),
        declares={"causal": False, "positions": "none"},
    )


@trap("style-large-weights", "Twelve layers with weights three times as large amplify rounding beyond any tolerance")
def large_weights() -> Subject:
    return _given_encoder(3.0)


@trap("style-small-weights", "Twelve layers with weights a hundredth as large: float32 rounds their influence away")
def small_weights() -> Subject:
    return _given_encoder(0.01)


@trap("style-eight-digits", "GELU with the constant 0.79788456, eight digits of sqrt(2 / pi)", "NVIDIA/Megatron-LM")
def eight_digits() -> Subject:
    class Network(_Network):
        def forward(self, x: Tensor) -> Tensor:
            y = self.up(x)
            return self.down(self.drop(0.5 * y * (1 + torch.tanh(0.79788456 * y * (1 + 0.044715 * y * y)))))

    return _feed_forward(Network, activation="gelu_tanh")


@trap("style-float32-table", "Sinusoids are made in float32 and kept as a buffer", "pytorch/tutorials")
def narrow_table() -> Subject:
    class Model(_Encoder):
        def __init__(self, config: DrawnConfig) -> None:
            super().__init__(config)
            rate = torch.exp(torch.arange(0, config.d_model, 2).float() * (-math.log(10000.0) / config.d_model))
            angles = torch.arange(512).float()[:, None] * rate
            table = torch.stack([angles.sin(), angles.cos()], -1).flatten(1)[:, : config.d_model]
            self.register_buffer("table", table)

        def embed(self, tokens: Tensor) -> Tensor:
            return self.embedding(tokens) + self.table[: tokens.shape[1]]

    return _encoder(Model, positions="sinusoidal", padding_side="right")

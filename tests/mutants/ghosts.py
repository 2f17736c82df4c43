"""Faults of what stands for no token, of an axis that a backward forgets, of thresholds and of copies."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from veriformer.properties.subject.sizes import DrawnConfig
from veriformer.properties.subject.subject import Subject
from veriformer.tests.mutants import fault
from veriformer.tests.mutants.mending import put


class _Local(nn.Module):
    """Causal attention to the last three tokens, by unfolding keys and values."""

    window = 3

    def __init__(self, c: DrawnConfig, beside: Callable[[Tensor, int], Tensor]) -> None:
        super().__init__()
        self.heads, self.beside = c.num_heads, beside
        self.qkv, self.out = nn.Linear(c.d_model, 3 * c.d_model, bias=False), nn.Linear(c.d_model, c.d_model)

    def forward(self, x: Tensor) -> Tensor:
        w = self.window
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        k, v = (F.pad(t, (0, 0, w - 1, 0)).unfold(2, w, 1) for t in (k, v))  # [B, H, T, K, w]
        scores = torch.einsum("bhtk,bhtkw->bhtw", q, k) * q.shape[-1] ** -0.5
        real = self.beside(torch.ones(x.shape[1], dtype=torch.bool, device=x.device), w).unfold(0, w, 1)
        weights = scores.masked_fill(~real, torch.finfo(scores.dtype).min).softmax(-1)
        return self.out(torch.einsum("bhtw,bhtkw->bhtk", weights, v).transpose(1, 2).flatten(2))


@fault(
    "AT-ghost-keys",
    "Zeros that fill up the first windows count as keys: the mask is padded with True",
    killed_by=("attention.attends",),
    cause="zeros by which the sequence is filled up",
)
def zeros_are_attended() -> Subject:
    beside = put(
        lambda real, w: F.pad(real, (w - 1, 0), value=True), instead_of=lambda real, w: F.pad(real, (w - 1, 0))
    )
    return Subject(
        kind="self_attention", build=lambda c: _Local(c, beside), forward=lambda m, x: m(x),
        declares={"causal": True, "window": 3},
    )  # fmt: skip


@fault(
    "SM-backward-axis",
    "The backward of softmax, written by hand, sums over the last axis whatever the axis of the softmax is",
    killed_by=("softmax.jacobian",),
    cause="it sums output times gradient over axis",
)
def backward_sums_over_the_last_axis() -> Subject:
    axis = put(lambda dim: -1, instead_of=lambda dim: dim)

    class Softmax(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, scores: Tensor, dim: int) -> Tensor:
            weights = scores.softmax(dim)
            ctx.save_for_backward(weights)
            ctx.dim = dim
            return weights

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, gradient: Tensor) -> Any:
            (weights,) = ctx.saved_tensors
            return weights * (gradient - (weights * gradient).sum(axis(ctx.dim), keepdim=True)), None

    return Subject(
        kind="softmax", forward=lambda module, scores, dim=-1: Softmax.apply(scores, dim),
        declares={"once_differentiable": True},
    )  # fmt: skip


@fault(
    "LS-shallow-layers",
    "Layers are cloned with copy.copy, so that all hold the same parts",
    killed_by=("layer.composition",),
    cause="copies copy no part",
)
def layers_share_their_parts() -> Subject:
    cloned = put(copy.copy, instead_of=copy.deepcopy)

    class Encoder(nn.Module):
        def __init__(self, c: DrawnConfig) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(c.d_model, c.num_heads, c.d_ff, 0.0, batch_first=True)
            self.layers = nn.ModuleList([cloned(layer) for _ in range(max(c.num_layers, 2))])

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    return Subject(
        kind="encoder",
        build=Encoder,
        forward=lambda m, x: m(x),
        inputs="embeddings",
        declares={"positions": "none"},
    )


@fault(
    "SP-threshold-undivided",
    "The k-th largest logit is read before the division by the temperature and compared with logits after it",
    killed_by=("decoding.sampling",),
    cause="before the division by the temperature",
)
def threshold_is_not_divided() -> Subject:
    of = put(lambda logits, divided: logits, instead_of=lambda logits, divided: divided)

    class Model(nn.Module):
        def __init__(self, c: DrawnConfig) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(c.vocab_size, c.d_model), nn.Linear(c.d_model, c.vocab_size)

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed(tokens)
            many = torch.arange(1, tokens.shape[1] + 1, device=x.device, dtype=x.dtype)[:, None]
            return self.head(x + x.cumsum(1) / many)

    @torch.no_grad()
    def sample(m: Model, tokens: Tensor, steps: int, temperature: float = 1.0, top_k: int | None = None) -> Any:
        drawn = []
        for _ in range(steps):
            logits = m(tokens)[:, -1]
            divided = logits / temperature
            if top_k is not None:
                least = of(logits, divided).topk(min(top_k, logits.shape[-1])).values[:, -1:]
                best = divided.amax(-1, keepdim=True)
                divided = divided.masked_fill((divided < least) & (divided < best), -torch.inf)
            drawn.append(divided.softmax(-1))
            tokens = torch.cat([tokens, torch.multinomial(drawn[-1], 1)], 1)
        return tokens, torch.stack(drawn, 1)

    return Subject(kind="decoder", build=Model, forward=lambda m, tokens: m(tokens), sampling=sample,
                   declares={"structure": "other", "positions": "none"})  # fmt: skip

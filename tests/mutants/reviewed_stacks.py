"""Faults that strangers put into their reviews: what a stack shares and must not, and what it must and does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from veriformer.properties.subject.sizes import DrawnConfig
from veriformer.properties.subject.subject import Subject
from veriformer.tests.mutants import fault
from veriformer.tests.mutants.mending import put
from veriformer.tests.mutants.reviewed import Block

Joined = Callable[[Tensor, Tensor], Tensor]


@fault(
    "init-twins",
    "Queries and keys of every layer start with the same weights: one key of a generator is used twice",
    killed_by=("init.layers-differ",),
    cause="is used twice",
)
def keys_are_used_twice() -> Subject:
    apart = put(0, instead_of=1)

    class Drawn(nn.Module):
        def __init__(self, c: DrawnConfig) -> None:
            super().__init__()
            self.tokens, self.places = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
            self.layers = nn.ModuleList(Block(c) for _ in range(c.num_layers))
            self.q, self.k = (nn.ModuleList(nn.Linear(c.d_model, c.d_model) for _ in self.layers) for _ in range(2))
            for number, (q, k) in enumerate(zip(self.q, self.k, strict=True)):
                for key, part in ((2 * number, q), (2 * number + apart, k)):
                    nn.init.xavier_uniform_(part.weight, generator=torch.Generator().manual_seed(100 + key))

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
            for layer, q, k in zip(self.layers, self.q, self.k, strict=True):
                weights = (q(x) @ k(x).mT / x.shape[-1] ** 0.5).softmax(-1)
                x = x + weights @ layer.norm1(x)
                x = x + layer.branch(x)
            return x

    return Subject(
        kind="encoder", build=Drawn, forward=lambda m, tokens: m(tokens), mask_forms=(),
        declares={"norm_placement": "pre", "positions": "learned", "causal": False, "init": "xavier"},
    )  # fmt: skip


@fault(
    "norm-everywhere",
    "What makes norms is cached, and gives the same one each time: all norms of a model are one",
    killed_by=("layer.composition",),
    cause="are one module with one set of weights",
)
def norms_are_one() -> Subject:
    cached = put(True, instead_of=False)

    class Encoder(nn.Module):
        def __init__(self, c: DrawnConfig) -> None:
            super().__init__()
            self.tokens, self.places = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
            self.layers = nn.ModuleList(Block(c) for _ in range(c.num_layers))
            if cached:
                for layer in self.layers:
                    layer.norm1 = layer.norm2 = self.layers[0].norm1

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
            for layer in self.layers:
                x = x + layer.attention(layer.norm1(x))
                x = x + layer.branch(x)
            return x

    return Subject(
        kind="encoder", build=Encoder, forward=lambda m, tokens: m(tokens), mask_forms=(),
        declares={"norm_placement": "pre", "positions": "learned", "causal": False},
    )  # fmt: skip


class _Crossing(nn.Module):
    """An encoder and a decoder of as many layers; each decoder layer is given some output of the encoder."""

    def __init__(self, c: DrawnConfig, zipped: bool) -> None:
        super().__init__()
        self.zipped, self.heads = zipped, c.num_heads
        self.tokens, self.places = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.encoder, self.decoder = (nn.ModuleList(Block(c) for _ in range(c.num_layers)) for _ in range(2))
        self.q, self.kv = (nn.ModuleList(nn.Linear(c.d_model, n * c.d_model) for _ in self.decoder) for n in (1, 2))

    def embedded(self, tokens: Tensor) -> Tensor:
        return self.tokens(tokens) + self.places.weight[: tokens.shape[1]]

    def cross(self, number: int, x: Tensor, memory: Tensor) -> Tensor:
        q = self.q[number](x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = self.kv[number](memory).unflatten(-1, (2 * self.heads, -1)).transpose(1, 2).chunk(2, dim=1)
        return ((q @ k.mT / k.shape[-1] ** 0.5).softmax(-1) @ v).transpose(1, 2).flatten(2)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memories, x = [self.embedded(source)], self.embedded(target)
        for layer in self.encoder:
            y = memories[-1] + layer.attention(layer.norm1(memories[-1]))
            memories.append(y + layer.branch(y))
        hidden = torch.full((x.shape[1], x.shape[1]), -torch.inf, dtype=x.dtype).triu(1)
        for number, layer in enumerate(self.decoder):
            x = x + layer.attention(layer.norm1(x), hidden)
            x = x + self.cross(number, layer.norm2(x), memories[number + 1 if self.zipped else -1])
            x = x + layer.branch(x)
        return x


@fault(
    "memory-zipped",
    "Encoder and decoder run side by side: a decoder layer attends to the encoder after as many layers",
    killed_by=("layer.composition",),
    cause="attends to something else than",
)
def memories_differ() -> Subject:
    zipped = put(True, instead_of=False)
    return Subject(
        kind="encoder_decoder", build=lambda c: _Crossing(c, zipped), mask_forms=(),
        forward=lambda m, source, target: m(source, target),
        declares={"norm_placement": "pre", "positions": "learned", "causal": True},
    )  # fmt: skip


class _Summed(torch.autograd.Function):
    """The mean of -log p of the rows of a product, chunk by chunk, with its gradients."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, matrix: Tensor, labels: Tensor, joined: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:  # type: ignore[override]
        loss, of_x, of_matrix = x.new_zeros(()), torch.zeros_like(x), torch.zeros_like(matrix)
        for start in range(0, len(x), 3):
            rows = slice(start, start + 3)
            log_p = (x[rows] @ matrix.mT).log_softmax(-1)
            loss = loss - log_p.gather(-1, labels[rows, None]).sum() / len(x)
            slope = (log_p.exp() - F.one_hot(labels[rows], len(matrix))) / len(x)
            of_x[rows], of_matrix = slope @ matrix, joined(of_matrix, slope.mT @ x[rows])
        ctx.save_for_backward(of_x, of_matrix)
        return loss

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        of_x, of_matrix = ctx.saved_tensors
        return g * of_x, g * of_matrix, None, None


@fault(
    "LS-last-chunk",
    "The gradient of the output matrix is that of the last chunk of the loss alone; the loss is right",
    killed_by=("loss.of-model",),
    cause="the loss is right and the gradient of",
)
def last_chunk_alone() -> Subject:
    def last(sum_so_far: Tensor, part: Tensor) -> Tensor:
        return part

    joined = put(last, instead_of=torch.add)

    class Encoder(nn.Module):
        def __init__(self, c: DrawnConfig) -> None:
            super().__init__()
            self.tokens, self.places = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
            self.layers = nn.ModuleList(Block(c) for _ in range(c.num_layers))
            self.head = nn.Linear(c.d_model, c.vocab_size, bias=False)

        def stream(self, tokens: Tensor) -> Tensor:
            x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
            for layer in self.layers:
                x = x + layer.attention(layer.norm1(x))
                x = x + layer.branch(x)
            return x

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.stream(tokens))  # type: ignore[no-any-return]

        def loss(self, tokens: Tensor, labels: Tensor) -> Tensor:
            x = self.stream(tokens).flatten(0, 1)
            return _Summed.apply(x, self.head.weight, labels.flatten(), joined)  # type: ignore[no-any-return,no-untyped-call]

    return Subject(
        kind="encoder", build=Encoder, forward=lambda m, tokens: m(tokens), mask_forms=(),
        loss=lambda m, tokens, labels: m.loss(tokens, labels),
        declares={"norm_placement": "pre", "positions": "learned", "causal": False, "once_differentiable": True},
    )  # fmt: skip

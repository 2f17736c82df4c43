"""Faults of what is kept from call to call, of modules that stand in a list twice, and of whose axis is whose."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from veriformer.properties.subject.sizes import DrawnConfig
from veriformer.properties.subject.subject import Subject
from veriformer.tests.mutants import fault
from veriformer.tests.mutants.mending import put_class
from veriformer.tests.mutants.mixtures import Layer, Mixture


@fault(
    "experts-one",
    "The list of experts holds one module four times over",
    killed_by=("layer.composition",),
    cause="one module with one set of weights",
)
def one_expert_four_times() -> Subject:
    class Shared(Mixture):
        def __init__(self, width: int, inner: int) -> None:
            super().__init__(width, inner)
            self.experts = nn.ModuleList([self.experts[0]] * 4)

    mixture = put_class(Shared)
    return Subject(
        kind="layer",
        build=lambda c: Layer(c, mixture),
        declares={"norm_placement": "pre", "shared_layers": False},
    )


class Attention(nn.Module):
    """Attention with a mask, over itself or over a memory."""

    def __init__(self, c: DrawnConfig) -> None:
        super().__init__()
        self.heads = c.num_heads
        self.q, self.k, self.v, self.o = (nn.Linear(c.d_model, c.d_model) for _ in range(4))

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def merge(self, heads: Tensor) -> Tensor:
        return heads.transpose(1, 2).flatten(2)

    def forward(self, x: Tensor, memory: Tensor, allowed: Tensor) -> Tensor:
        q, k, v = self.split(self.q(x)), self.split(self.k(memory)), self.split(self.v(memory))
        scores = (q @ k.mT) / math.sqrt(q.shape[-1])
        given: Tensor = self.o(self.merge(scores.masked_fill(~allowed, -1e9).softmax(-1) @ v))
        return given


class Encoder(nn.Module):
    """A pre-LN encoder of tokens with learned positions, whose masks are made anew."""

    def __init__(self, c: DrawnConfig, attention: type[Attention] = Attention) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.attentions = nn.ModuleList(attention(c) for _ in range(c.num_layers))
        self.norms = nn.ModuleList(nn.LayerNorm(c.d_model) for _ in range(c.num_layers))
        self.last = nn.LayerNorm(c.d_model)

    def allowed(self, length: int, device: torch.device) -> Tensor:
        return torch.ones(length, length, dtype=torch.bool, device=device)[None, None]

    def seen(self, length: int, mask: Tensor | None, device: torch.device) -> Tensor:
        allowed = self.allowed(length, device)
        return allowed if mask is None else allowed & mask[:, None, None]

    def forward(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        length = tokens.shape[1]
        allowed = self.seen(length, attention_mask, tokens.device)
        x = self.table(tokens) + self.places(torch.arange(length, device=tokens.device))
        for norm, attention in zip(self.norms, self.attentions, strict=True):
            x = x + attention(norm(x), norm(x), allowed)
        given: Tensor = self.last(x)
        return given


def _encoder(model: Any) -> Subject:
    return Subject(
        kind="encoder",
        build=model,
        forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
        declares={"causal": False, "positions": "learned", "padding_side": "right"},
    )


@fault(
    "mask-kept",
    "A mask that is kept by the length of a call is written to by the padding of the one that it is kept from",
    killed_by=("numerics.stateless",),
    cause="what one call hides stays hidden|hidden stays hidden",
)
def kept_mask_is_written_to() -> Subject:
    class Keeping(Encoder):
        kept: dict[int, Tensor]

        def seen(self, length: int, mask: Tensor | None, device: torch.device) -> Tensor:
            self.__dict__.setdefault("kept", {})
            allowed = self.kept.setdefault(length, self.allowed(length, device))
            if mask is not None and len(mask) == 1:
                allowed &= mask[:, None, None]
            return allowed if mask is None else allowed & mask[:, None, None]

    return _encoder(put_class(Keeping))


@fault(
    "heads-as-they-lie",
    "Heads and positions are not changed back before heads are merged",
    killed_by=("anatomy.softmax",),
    cause="a transpose is missing before the reshape",
)
def heads_are_merged_as_they_lie() -> Subject:
    class Lying(Attention):
        def merge(self, heads: Tensor) -> Tensor:
            return heads.reshape(len(heads), heads.shape[2], -1)

    attention = put_class(Lying)
    return _encoder(lambda c: Encoder(c, attention))


class Translator(nn.Module):
    """An encoder-decoder that decodes through a cache of its memory and of the target so far."""

    def __init__(self, c: DrawnConfig) -> None:
        super().__init__()
        self.encoder, self.target = Encoder(c), nn.Embedding(c.vocab_size, c.d_model)
        self.places = nn.Embedding(c.max_len, c.d_model)
        self.own, self.cross = Attention(c), Attention(c)
        self.norms = nn.ModuleList(nn.LayerNorm(c.d_model) for _ in range(3))
        self.last = nn.Linear(c.d_model, c.vocab_size)

    def decoded(self, x: Tensor, past: Tensor | None, memory: Tensor) -> tuple[Tensor, Tensor]:
        behind = 0 if past is None else past.shape[1]
        x = self.target(x) + self.places(torch.arange(behind, behind + x.shape[1], device=x.device))
        own = self.norms[0](x)
        known = own if past is None else torch.cat([past, own], dim=1)
        causal = torch.ones(x.shape[1], known.shape[1], dtype=torch.bool, device=x.device).tril(behind)
        x = x + self.own(own, known, causal)
        all_of_it = torch.ones(x.shape[1], memory.shape[1], dtype=torch.bool, device=x.device)
        x = x + self.cross(self.norms[1](x), memory, all_of_it)
        return self.last(self.norms[2](x)), known

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.decoded(target, None, self.encoder(source))[0]

    def memory(self, source: Tensor) -> Tensor:
        memory: Tensor = self.encoder(source)
        return memory

    def cached(self, source: Tensor, chunks: list[Tensor]) -> Tensor:
        memory, past, found = self.memory(source), None, []
        for chunk in chunks:
            logits, past = self.decoded(chunk, past, memory)
            found.append(logits)
        return torch.cat(found, dim=1)


@fault(
    "memory-kept",
    "What was made of a source is kept for the next one of the same shape",
    killed_by=("decoding.cache",),
    cause="what is kept of that is used again",
)
def memory_of_another_source() -> Subject:
    class Remembering(Translator):
        def memory(self, source: Tensor) -> Tensor:
            kept = self.__dict__.setdefault("kept", {})
            found: Tensor = kept.setdefault(source.shape, super().memory(source))
            return found

    return Subject(
        kind="encoder_decoder",
        build=put_class(Remembering),
        forward=lambda m, source, target: m(source, target),
        cache=lambda m, source, chunks: m.cached(source, chunks),
        declares={"causal": True, "positions": "learned"},
    )


class DropPath(nn.Module):
    """Stochastic depth over the samples of `[T, B, D]`."""

    axis = 1

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.rate:
            return x
        shape = [n if axis == self.axis else 1 for axis, n in enumerate(x.shape)]
        return x * (torch.rand(shape, device=x.device) >= self.rate) / (1 - self.rate)


class TimeFirst(nn.Module):
    """A feed-forward sublayer that computes `[T, B, D]`."""

    def __init__(self, c: DrawnConfig, drop: type[DropPath]) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(c.d_model, c.d_ff), nn.Linear(c.d_ff, c.d_model), drop(c.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        return (x + self.drop(self.down(self.up(x).relu()))).transpose(0, 1)


@fault(
    "droppath-time",
    "Stochastic depth drops steps of time of a layer that computes time first",
    killed_by=("droppath.expectation",),
    cause="for each step of time",
)
def steps_of_time_are_dropped() -> Subject:
    class DropPathOverTime(DropPath):
        axis = 0

    drop = put_class(DropPathOverTime)
    return Subject(kind="feed_forward", build=lambda c: TimeFirst(c, drop), declares={"structure": "other"})


class Pictures(nn.Module):
    """A model of images: patches, positions, a stack of layers, the mean."""

    def __init__(self, c: DrawnConfig) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, c.d_model, 4, 4)
        self.places = nn.Parameter(torch.randn(1, 6, c.d_model))
        layer = nn.TransformerEncoderLayer(c.d_model, c.num_heads, c.d_ff, 0.0, batch_first=True)
        self.stack = nn.TransformerEncoder(layer, c.num_layers, enable_nested_tensor=False)

    def placed(self, x: Tensor) -> Tensor:
        return x + self.places

    def forward(self, images: Tensor) -> Tensor:
        given: Tensor = self.stack(self.placed(self.patches(images).flatten(2).mT)).mean(1)
        return given


@fault(
    "image-positions-lost",
    "A model of images adds its positions to nothing; its stack is judged alone, on embeddings",
    killed_by=("parameters.all-used",),
    cause="takes no part in what the model gives for an image",
)
def positions_of_images_are_lost() -> Subject:
    class Lost(Pictures):
        def placed(self, x: Tensor) -> Tensor:
            return x

    model = put_class(Lost)

    def stack(c: DrawnConfig) -> nn.Module:
        whole = model(c)
        whole.stack.__dict__["whole"] = whole
        found: nn.Module = whole.stack
        return found

    return Subject(
        kind="encoder",
        inputs="embeddings",
        build=stack,
        forward=lambda m, x: m(x),
        image=(3, 8, 12),
        declares={"positions": "none", "causal": False, "structure": "textbook"},
    )


class Grouped(Attention):
    """Attention whose heads share keys and values in groups, in blocks."""

    def __init__(self, c: DrawnConfig) -> None:
        super().__init__(c)
        self.k, self.v = (nn.Linear(c.d_model, c.num_key_value_heads * c.d_head) for _ in range(2))

    def deal(self, x: Tensor) -> Tensor:
        return x.repeat_interleave(self.heads // x.shape[1], dim=1)

    def forward(self, x: Tensor, memory: Tensor, allowed: Tensor) -> Tensor:
        q, width = self.split(self.q(x)), self.q.out_features // self.heads
        k, v = (self.deal(y.unflatten(-1, (-1, width)).transpose(1, 2)) for y in (self.k(memory), self.v(memory)))
        scores = (q @ k.mT) / math.sqrt(width)
        given: Tensor = self.o(self.merge(scores.masked_fill(~allowed, -1e9).softmax(-1) @ v))
        return given


@fault(
    "groups-undeclared",
    "Groups of keys are dealt to the heads in turns, and nothing says that there are groups",
    killed_by=("anatomy.softmax",),
    cause="in turns (0 1 0 1)",
)
def groups_that_nobody_declared() -> Subject:
    class Tiled(Grouped):
        def deal(self, x: Tensor) -> Tensor:
            return x.repeat(1, self.heads // x.shape[1], 1, 1)

    attention = put_class(Tiled)
    return _encoder(lambda c: Encoder(c, attention))

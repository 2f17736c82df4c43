"""Faults of decoding that only a second chunk, a second layer or a full window shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from veriformer.properties.subject.sizes import DrawnConfig
from veriformer.properties.subject.subject import Subject
from veriformer.reference.model import build
from veriformer.reference.position_bias import NoBias
from veriformer.tests.mutants import fault
from veriformer.tests.mutants.mending import put, put_class
from veriformer.tests.mutants.parts import SelfAttention, sized


class Turned(nn.Module):
    """The rotation of a layer, at positions that a fault changes while decoding."""

    def __init__(self, inner: nn.Module, change: Callable[[Tensor, int], Tensor]) -> None:
        super().__init__()
        self.inner, self.change, self.decoding = inner, change, False

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return self.inner(x, self.change(positions, x.shape[2]) if self.decoding else positions)


def turned(change: Callable[[Tensor, int], Tensor], from_layer: int = 0) -> Subject:
    change = put(change, instead_of=lambda positions, new: positions)

    def make(config: DrawnConfig) -> nn.Module:
        model = build(sized(config, architecture="decoder", positions="rotary"))
        for layer in model.get_submodule("stack.layers").children() if from_layer == 0 else _later(model, from_layer):
            layer.attention.rotary = Turned(layer.attention.rotary, change)  # type: ignore[union-attr,assignment]
        return model

    return _decoder(make, _cached, "rotary")


def _later(model: nn.Module, first: int) -> list[nn.Module]:
    return list(model.get_submodule("stack.layers").children())[first:]


def _decoder(make: Any, cache: Any, positions: str) -> Subject:
    return Subject(
        kind="decoder",
        build=make,
        forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
        cache=cache,
        declares={"positions": positions, "causal": True},
    )


def _plain_decoder(cache: Any, positions: str) -> Subject:
    def make(config: DrawnConfig) -> nn.Module:
        return build(sized(config, architecture="decoder", positions=positions))

    return _decoder(make, put(cache, instead_of=_cached), positions)


def _cached(model: nn.Module, chunks: Any) -> Tensor:
    cache = model.new_cache()  # type: ignore[operator]
    turns = [m for m in model.modules() if isinstance(m, Turned)]
    for turn in turns:
        turn.decoding = True
    outputs = [model(chunk, cache=cache) for chunk in chunks]
    for turn in turns:
        turn.decoding = False
    return torch.cat(outputs, dim=1)


@fault(
    "RP07",
    "Seen-token counter advanced mid-forward: upper layers off by one",
    killed_by=("decoding.cache",),
    cause="advanced by the chunk",
)
def counted_early() -> Subject:
    return turned(lambda positions, new: positions + new, from_layer=1)


@fault(
    "RP14",
    "Micro-batched inference broadcasts one position over the slice",
    killed_by=("decoding.cache",),
    cause="get one position",
)
def one_position() -> Subject:
    return turned(lambda positions, new: positions[:, -1:].expand_as(positions))


@fault(
    "RP10",
    "Dynamic-NTK keys cached with old base",
    killed_by=("decoding.cache",),
    cause="how long the sequence is",
)
def old_base() -> Subject:
    class Dynamic(nn.Module):
        """Rotary positions whose base grows with the longest position of the call, from 4 positions on."""

        def forward(self, x: Tensor, positions: Tensor) -> Tensor:
            length = int(positions.max()) + 1
            base = 10000.0 * max(1.0, 2.0 * length / 4 - 1.0)
            half = x.shape[-1] // 2
            rates = base ** (-torch.arange(half, dtype=torch.float64) / max(half, 1))
            angle = (positions.double()[:, None, :, None] * rates).to(x.dtype)
            a, b = x[..., :half], x[..., half : 2 * half]
            turned = (a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos(), x[..., 2 * half :])
            return torch.cat(turned, dim=-1)

    def make(config: DrawnConfig) -> nn.Module:
        model = build(sized(config, architecture="decoder", positions="rotary"))
        for layer in _later(model, 0):
            layer.attention.rotary = Dynamic()  # type: ignore[union-attr,assignment]
        return model

    return _decoder(make, _cached, "rotary")


@fault("RB05", "Relative bias dropped on cached decode", killed_by=("decoding.cache",), cause="bias by distance")
def without_bias() -> Subject:
    def run(model: nn.Module, chunks: Any) -> Tensor:
        cache, outputs = model.new_cache(), []  # type: ignore[operator]
        kept = [(layer.attention, layer.attention.position_bias) for layer in _later(model, 0)]  # type: ignore[union-attr]
        for number, chunk in enumerate(chunks):
            for attention, bias in kept:
                attention.position_bias = bias if number == 0 else NoBias()  # type: ignore[union-attr,assignment]
            outputs.append(model(chunk, cache=cache))
        for attention, bias in kept:
            attention.position_bias = bias  # type: ignore[union-attr,assignment]
        return torch.cat(outputs, dim=1)

    return _plain_decoder(run, "t5")


@fault(
    "XA10",
    "Cross-attention cache updates lost by rebinding a dict entry",
    killed_by=("decoding.cache",),
    cause="not used",
)
def rebound() -> Subject:
    def run(model: nn.Module, chunks: Any) -> Tensor:
        outputs, cache = [], model.new_cache()  # type: ignore[operator]
        for chunk in chunks:
            own = model.new_cache()  # type: ignore[operator]
            own.mask = cache.mask  # the keys are written to a copy and lost, the count of tokens is kept
            for layer, seen in zip(own.layers, cache.layers, strict=True):
                if seen.key is not None:
                    layer.key, layer.value = torch.zeros_like(seen.key), torch.zeros_like(seen.value)
                    layer.positions = seen.positions
            outputs.append(model(chunk, cache=own))
            cache = own
        return torch.cat(outputs, dim=1)

    return _plain_decoder(run, "rotary")


@fault("KV11", "Cache never used; mask silently truncated to fit", killed_by=("decoding.cache",), cause="not used")
def never_used() -> Subject:
    def run(model: nn.Module, chunks: Any) -> Tensor:
        outputs, seen = [], 0
        for chunk in chunks:
            fresh = model.new_cache()  # type: ignore[operator]
            outputs.append(model(chunk, cache=fresh))
            seen += chunk.shape[1]
        return torch.cat(outputs, dim=1)

    return _plain_decoder(run, "rotary")


class Windowed(nn.Module):
    """A decoder of one layer that sees the last `WINDOW` tokens, and a cache of as many slots."""

    WINDOW = 3

    def __init__(self, config: DrawnConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.d_model)
        self.q, self.k, self.v = (nn.Linear(config.d_model, config.d_model) for _ in range(3))
        self.head = nn.Linear(config.d_model, config.vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        x, length = self.tokens(tokens), tokens.shape[1]
        allow = torch.ones(length, length, dtype=torch.bool).tril().triu(1 - self.WINDOW)
        return self.mix(x, self.k(x), self.v(x), allow)

    def mix(self, x: Tensor, key: Tensor, value: Tensor, allow: Tensor) -> Tensor:
        scores = self.q(x) @ key.transpose(-2, -1) * x.shape[-1] ** -0.5
        return self.head(x + scores.masked_fill(~allow, -torch.inf).softmax(-1) @ value)

    def slots(self, position: int) -> list[int]:
        """Return the slots of the ring that hold what `position` may see."""
        return [p % self.WINDOW for p in range(max(0, position - self.WINDOW + 1), position + 1)]

    def decode(self, chunks: Any) -> Tensor:
        keys: dict[int, Tensor] = {}
        values: dict[int, Tensor] = {}
        outputs, position = [], 0
        for chunk in chunks:
            for token in chunk.split(1, dim=1):
                x = self.tokens(token)
                keys[position % self.WINDOW], values[position % self.WINDOW] = self.k(x), self.v(x)
                chosen = self.slots(position)
                key, value = (torch.cat([t[s] for s in chosen], dim=1) for t in (keys, values))
                outputs.append(self.mix(x, key, value, torch.ones(1, len(chosen), dtype=torch.bool)))
                position += 1
        return torch.cat(outputs, dim=1)


def windowed(cls: type[Windowed]) -> Subject:
    return Subject(
        kind="decoder",
        build=put_class(cls),
        forward=lambda m, tokens: m(tokens),
        cache=lambda m, chunks: m.decode(chunks),
        declares={"positions": "other", "causal": True, "window": Windowed.WINDOW},
    )


@fault(
    "KV08",
    "Sliding-window cache wrong once length reaches the window",
    killed_by=("decoding.cache",),
    cause="overwritten",
)
def stale_slot() -> Subject:
    class Stale(Windowed):
        def slots(self, position: int) -> list[int]:
            # once the ring is full, the slot that was just written is taken for the oldest and left out
            found = super().slots(position)
            return found if position < self.WINDOW else [p % self.WINDOW for p in range(position, position + 2)]

    return windowed(Stale)


@fault(
    "RP08",
    "Frequency cache keyed on length but not on offset",
    killed_by=("rotary.composition",),
    cause="not the identity|of the call before",
)
def keyed_on_length() -> Subject:
    class Keyed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables: dict[int, Tensor] = {}

        def forward(self, x: Tensor, positions: Tensor) -> Tensor:
            half = x.shape[-1] // 2
            rates = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
            angle = self.tables.setdefault(len(positions), positions.double()[:, None] * rates)
            cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
            a, b = x.chunk(2, dim=-1)
            return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)

    return Subject(
        kind="rotary", build=lambda c: Keyed(), forward=lambda m, x, positions: m(x, positions),
        declares={"layout": "halves"},
    )  # fmt: skip


@fault(
    "KV-chunk-attention",
    "An attention layer's mask of a chunk does not count the cached past",
    killed_by=("decoding.cache",),
    cause="one token at a time all is right",
)
def chunk_in_the_corner() -> Subject:
    class Cached(SelfAttention):
        def allowed(self, queries: int, keys: int) -> Tensor:
            return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)

        def forward(self, x: Tensor, attention_mask: Tensor | None = None, past: Any = None) -> Any:
            q, k, v = (self.split(part(x)) for part in (self.q, self.k, self.v))
            if past is not None:
                k, v = (torch.cat(pair, dim=2) for pair in zip(past, (k, v), strict=True))
            scores = q @ k.mT * self.width**-0.5
            scores = scores.masked_fill(~self.allowed(q.shape[2], k.shape[2]), -torch.inf)
            return self.o(self.merge(scores.softmax(-1) @ v)), (k, v)

    class Corner(Cached):
        def allowed(self, queries: int, keys: int) -> Tensor:
            return torch.ones(queries, keys, dtype=torch.bool).tril(0 if queries > 1 else keys - 1)

    def cached(model: Any, chunks: Any) -> Tensor:
        outputs, past = [], None
        for chunk in chunks:
            output, past = model(chunk, past=past)
            outputs.append(output)
        return torch.cat(outputs, dim=1)

    cls = put(Corner, instead_of=Cached)
    return Subject(
        kind="self_attention", build=cls, forward=lambda m, x: m(x)[0], cache=cached, declares={"causal": True}
    )

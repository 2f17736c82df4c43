"""Faults of generation when its context is full."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from veriformer.properties.subject.subject import Subject
from veriformer.reference.cache import KVCache
from veriformer.reference.model import build
from veriformer.tests.mutants import fault
from veriformer.tests.mutants.mending import put
from veriformer.tests.mutants.parts import sized

CONTEXT = 16


def anew(model: Any, tokens: Tensor, cache: KVCache) -> tuple[KVCache, Tensor]:
    """Begin a new cache with as many of the last tokens as fit."""
    return model.new_cache(), tokens[:, -CONTEXT:]


def streaming(make_room: Any, positions: str) -> Subject:
    """A decoder that goes on when its context is full; `make_room` is then asked for a cache and what to feed."""

    def generate(model: Any, tokens: Tensor, steps: int, use_cache: bool) -> Tensor:
        cache, fed = model.new_cache(), tokens[:, -CONTEXT:]
        with torch.no_grad():
            for _ in range(steps):
                if use_cache and cache.length + fed.shape[1] > CONTEXT:
                    cache, fed = make_room(model, tokens, cache)
                logits = model(fed, cache=cache) if use_cache else model(tokens[:, -CONTEXT:])
                fed = logits[:, -1:].argmax(-1)
                tokens = torch.cat([tokens, fed], dim=1)
        return tokens

    def forward(model: nn.Module, tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        if tokens.shape[1] > CONTEXT:
            raise ValueError(f"{tokens.shape[1]} tokens, at most {CONTEXT}")
        return model(tokens, attention_mask)

    return Subject(
        kind="decoder",
        build=lambda c: build(replace(sized(c, architecture="decoder", positions=positions), max_len=CONTEXT)),
        forward=forward,
        generate=generate,
        declares={"positions": positions, "max_len": CONTEXT, "beyond_max_len": "error", "padding_side": "both"},
    )


@fault(
    "KV-full",
    "When the cache is full its oldest key is dropped, though those that stay hold learned positions",
    killed_by=("decoding.generate",),
    cause="which are absolute",
)
def oldest_dropped() -> Subject:
    def forget_oldest(model: Any, tokens: Tensor, cache: KVCache) -> tuple[KVCache, Tensor]:
        for layer in cache.layers:
            layer.key, layer.value = layer.key[:, :, 1:], layer.value[:, :, 1:]  # type: ignore[index]
            layer.positions = layer.positions[:, 1:]  # type: ignore[index]
        cache.mask = cache.mask[:, 1:]  # type: ignore[index]
        return cache, tokens[:, -1:]

    return streaming(put(forget_oldest, instead_of=anew), "learned")


@fault(
    "KV-full-start",
    "When the cache is full a new one begins with the first tokens, not with the last",
    killed_by=("decoding.generate",),
    cause="cut at its end",
)
def first_kept() -> Subject:
    def first(model: Any, tokens: Tensor, cache: KVCache) -> tuple[KVCache, Tensor]:
        return model.new_cache(), tokens[:, :CONTEXT]

    return streaming(put(first, instead_of=anew), "rotary")

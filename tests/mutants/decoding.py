"""Faults of decoding with a cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from veriformer.properties.adapters.reference_models import cached
from veriformer.properties.adapters.reference_models import forward as plain_forward
from veriformer.properties.adapters.reference_models import generate as right_generate
from veriformer.properties.subject.subject import Subject
from veriformer.reference.cache import LayerCache
from veriformer.reference.model import build
from veriformer.tests.mutants import fault
from veriformer.tests.mutants.mending import put
from veriformer.tests.mutants.parts import sized


def decoder(cache: Any, positions: str = "rotary") -> Subject:
    return Subject(
        kind="decoder",
        build=lambda c: build(sized(c, architecture="decoder", positions=positions)),
        forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
        cache=cache and put(cache, instead_of=cached),
        declares={"positions": positions, "causal": True, "padding_side": "both"},
    )


class Broken(LayerCache):
    """A cache of one layer that a fault alters."""


def through(cls: type[LayerCache]) -> Any:
    def run(model: nn.Module, chunks: Any, attention_mask: Any = None) -> Tensor:
        cache, start, outputs = model.new_cache(), 0, []
        for layer in cache.layers:
            layer.__class__ = cls
        for chunk in chunks:
            mask = None if attention_mask is None else attention_mask[:, start : start + chunk.shape[1]]
            outputs.append(model(chunk, mask, cache=cache))
            start += chunk.shape[1]
        return torch.cat(outputs, dim=1)

    return run


@fault("KV01-cache", "Value cache assigned from keys", killed_by=("decoding.cache",), cause="stored for values")
def values_from_keys() -> Subject:
    class Mixed(LayerCache):
        def append(self, key: Tensor, value: Tensor, positions: Tensor) -> Any:
            k, v, p = super().append(key, value, positions)
            old = k.shape[2] - key.shape[2]
            return k, torch.cat([k[:, :, :old], v[:, :, old:]], dim=2), p

    return decoder(through(Mixed))


@fault("KV02-cache", "The first token of the past is missing", killed_by=("decoding.cache",), cause="the first token")
def first_missing() -> Subject:
    class Missing(LayerCache):
        def append(self, key: Tensor, value: Tensor, positions: Tensor) -> Any:
            k, v, p = super().append(key, value, positions)
            old = k.shape[2] - key.shape[2]
            if old:
                k, v = k.clone(), v.clone()
                k[:, :, 0], v[:, :, 0] = k[:, :, old], v[:, :, old]
            return k, v, p

    return decoder(through(Missing))


@fault(
    "KV-restart",
    "Positions start anew with every chunk",
    killed_by=("decoding.cache",),
    cause="not used",
)
def restarted() -> Subject:
    def run(model: nn.Module, chunks: Any, attention_mask: Any = None) -> Tensor:
        return torch.cat([model(chunk) for chunk in chunks], dim=1)

    return decoder(run)


@fault(
    "KV04-cache",
    "The cache survives into the next generation",
    killed_by=("decoding.cache",),
    cause="not cleared",
)
def survives() -> Subject:
    def run(model: nn.Module, chunks: Any, attention_mask: Any = None) -> Tensor:
        if not hasattr(model, "kept"):
            model.kept = model.new_cache()
        return torch.cat([model(chunk, cache=model.kept) for chunk in chunks], dim=1)

    return decoder(run)


@fault(
    "KV-mask",
    "The mask of the past is forgotten",
    killed_by=("decoding.left-padding",),
    cause="not used with the cache",
)
def mask_forgotten() -> Subject:
    def run(model: nn.Module, chunks: Any, attention_mask: Any = None) -> Tensor:
        return cached(model, chunks)

    return decoder(run)


def reordering(cls: type[LayerCache], keep_mask: bool = False) -> Any:
    def run(model: nn.Module, chunks: Any, attention_mask: Any = None, reorder: Any = None) -> Tensor:
        cache, start, outputs = model.new_cache(), 0, []
        for layer in cache.layers:
            layer.__class__ = cls
        for number, chunk in enumerate(chunks):
            if number == 1 and reorder is not None:
                mask = cache.mask
                cache.reorder(reorder)
                cache.mask = mask if keep_mask else cache.mask
            given = None if attention_mask is None else attention_mask[:, start : start + chunk.shape[1]]
            outputs.append(model(chunk, given, cache=cache))
            start += chunk.shape[1]
        return torch.cat(outputs, dim=1)

    return run


@fault(
    "KV05-beam",
    "The cache is not reordered since it has another name",
    killed_by=("decoding.beam-reorder",),
    cause="not reordered",
)
def not_reordered() -> Subject:
    class Skipped(LayerCache):
        def reorder(self, samples: Tensor) -> None:
            pass

    return decoder(reordering(Skipped))


@fault("KV07-beam", "Heads are reordered, not samples", killed_by=("decoding.beam-reorder",), cause="the heads of")
def wrong_axis() -> Subject:
    class Heads(LayerCache):
        def reorder(self, samples: Tensor) -> None:
            if self.key is not None and self.value is not None:
                order = samples % self.key.shape[1]
                self.key, self.value = (
                    self.key[:, order[: self.key.shape[1]]],
                    self.value[:, order[: self.key.shape[1]]],
                )

    return decoder(reordering(Heads))


@fault(
    "KV10-beam",
    "The padding mask is not reordered with the beams",
    killed_by=("decoding.beam-reorder",),
    cause="mask of the past is not",
)
def mask_not_reordered() -> Subject:
    return decoder(reordering(LayerCache, keep_mask=True))


@fault(
    "KV-generate",
    "Generation with the cache restarts its positions",
    killed_by=("decoding.generate",),
    cause="past is not used",
)
def generates_wrongly() -> Subject:
    def generate(model: nn.Module, tokens: Tensor, steps: int, use_cache: bool) -> Tensor:
        for _ in range(steps):
            seen = tokens[:, -2:] if use_cache else tokens
            tokens = torch.cat([tokens, model(seen)[:, -1:].argmax(-1)], dim=1)
        return tokens

    return replace(decoder(None), cache=None, generate=put(generate, instead_of=right_generate))


@fault(
    "CM01-sum",
    "One future token leaks: probabilities do not sum to one",
    killed_by=("decoding.probability",),
    cause="one step ahead, and not through attention",
)
def leaks() -> Subject:
    def forward(model: nn.Module, tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        logits = model(tokens, attention_mask)
        return logits + 0.5 * torch.cat([logits[:, 1:], logits[:, -1:]], dim=1)

    return replace(decoder(None), cache=None, forward=put(forward, instead_of=plain_forward))


@fault(
    "KV-beams-in-place",
    "Beams are moved one after another in the same buffer",
    killed_by=("decoding.beam-reorder",),
    cause="read after it was overwritten",
)
def reordered_in_place() -> Subject:
    class InPlace(LayerCache):
        def reorder(self, samples: Tensor) -> None:
            for kept in (self.key, self.value):
                for to, source in enumerate(samples.tolist()):
                    kept[to] = kept[source].clone()  # type: ignore[index]
            self.positions = self.positions[samples]  # type: ignore[index]

    return decoder(reordering(InPlace))


@fault(
    "KV-bfloat16",
    "Keys and values are kept in bfloat16, whatever the model computes in",
    killed_by=("decoding.cache",),
    cause="kept in bfloat16",
)
def kept_in_bfloat16() -> Subject:
    class Narrow(LayerCache):
        def append(self, key: Tensor, value: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            self.key, self.value, self.positions = super().append(key, value, positions)
            self.key, self.value = (x.bfloat16().to(x.dtype) for x in (self.key, self.value))
            return self.key, self.value, self.positions

    return decoder(through(Narrow))

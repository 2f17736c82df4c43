"""Everything that is found beside one forward."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from veriformer.properties.adapters.beside.caching import cache_beside
from veriformer.properties.adapters.beside.generating import generate_beside
from veriformer.properties.adapters.beside.losses import loss_beside
from veriformer.properties.adapters.beside.offers import Offer
from veriformer.properties.adapters.beside.translating import translate_beside
from veriformer.properties.adapters.unknown.arguments import arguments_of
from veriformer.properties.adapters.unknown.understanding import Understood, tokens_of
from veriformer.properties.adapters.unknown.written import written
from veriformer.properties.subject.sizes import DrawnConfig
from veriformer.properties.subject.subject import Subject

_KINDS = ("decoder", "encoder", "classifier", "encoder_decoder")


def beside(sample: nn.Module, found: Understood, sizes: DrawnConfig) -> list[Offer]:
    """Return what a model has beside its forward.

    Args:
        sample: in eval mode, its weights free to be altered.
        found: how its forward is called.
        sizes: of the sample.
    """
    if found.kind == "encoder_decoder" and found.inputs == "tokens":
        translated = _translated(sample, found, sizes)
        if found.counts_from_one:
            return translated
    else:
        translated = []
    if found.kind not in _KINDS or found.part or found.counts_from_one:
        return []
    found = replace(found, wiring=found.wiring.unmasked())
    arguments = arguments_of(sample.forward)
    inputs = _inputs(found, sizes)
    try:
        output = found.wiring.call(sample, *inputs)
    except Exception:
        return []
    offers = [loss_beside(sample, found.kind, found.wiring, arguments, inputs, output)]
    if found.kind == "decoder" and found.inputs == "tokens":
        module = sys.modules.get(type(sample).__module__)
        turned = ".transpose(0, 1)" in found.wiring.pick
        offers.append(cache_beside(sample, module, found.wiring, arguments, sizes.vocab_size))
        offers += generate_beside(sample, module, sizes.vocab_size, turned=turned)
    return [offer for offer in [*offers, *translated] if offer is not None]


def _translated(sample: nn.Module, found: Understood, sizes: DrawnConfig) -> list[Offer]:
    """Return how an encoder-decoder generates, where its tokens are ours, or ours counted from 1."""
    is_moved = "source = source + 1" in found.wiring.before
    if found.counts_from_one and not is_moved:
        return []
    module = sys.modules.get(type(sample).__module__)
    return translate_beside(sample, module, sizes.vocab_size - is_moved, "source + 1" if is_moved else "source")


def _inputs(found: Understood, sizes: DrawnConfig) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(6)
    if found.inputs == "embeddings":
        return tuple(torch.randn(2, 6, sizes.d_model, generator=generator) for _ in found.wiring.inputs)
    return tuple(tokens_of(sizes.vocab_size, 2, 6 + i) for i in range(len(found.wiring.inputs)))[::-1]


def offering(subject: Subject, sample: nn.Module, offers: Sequence[Offer]) -> Subject:
    """Return a subject with what was found beside its forward."""
    module = sys.modules.get(type(sample).__module__)
    names: dict[str, Any] = {} if module is None else {"user": module}
    parts: dict[str, Any] = {
        o.part: written(o.source, o.part, names if "user." in o.source else {}) for o in offers if o.source
    }
    notes = tuple(note for o in offers for note in o.notes)
    guesses = {name: value for o in offers for name, value in o.guesses.items()}
    return replace(subject, **parts, notes=(*subject.notes, *notes), guesses={**subject.guesses, **guesses})

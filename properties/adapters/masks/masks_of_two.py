"""Which masks a model of two sequences takes: of the source or the memory, and what its caller makes for the target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from veriformer.properties.adapters.masks.caller_made import causal_form
from veriformer.properties.adapters.masks.forms import padding_forms
from veriformer.properties.adapters.masks.masking import HIDDEN, Run, mask_of, or_none, sequence_of
from veriformer.properties.adapters.masks.padding_tokens import by_tokens_of_two
from veriformer.properties.adapters.unknown.arguments import Argument, by_role, hides_where_true
from veriformer.properties.adapters.unknown.understanding import Understood
from veriformer.properties.adapters.unknown.wiring import Wiring, reached_by
from veriformer.properties.subject.sizes import DrawnConfig

_B, _T = 3, 5
_SOURCE = ("src", "source", "enc", "input", "encoder")
_TARGET = ("tgt", "trg", "target", "dec", "decoder", "look", "causal", "subsequent", "output")
_MEMORY = ("memory", "mem", "cross", "context")


def with_masks_of_two(
    found: Understood, sample: nn.Module, sizes: DrawnConfig, arguments: Sequence[Argument], padding_id: str
) -> Understood:
    """Return how a model of two sequences is called, with the masks that it takes, or the tokens that pad."""
    told = _with_masks(found, sample, sizes, arguments)
    if found.kind != "encoder_decoder" or told.wiring.masks:
        return told
    x, y = sequence_of(told, sizes), sequence_of(told, sizes)
    x = torch.cat([x, x[:, :2]], dim=1)
    return by_tokens_of_two(told, sample, sizes, padding_id, x, y) or told


def _with_masks(found: Understood, sample: nn.Module, sizes: DrawnConfig, arguments: Sequence[Argument]) -> Understood:
    masks = [a.name for a in by_role(arguments, "mask")]
    if found.kind == "cross_attention":
        return _with_memory_mask(found, sample, sizes, masks)
    if found.kind != "encoder_decoder":
        return found
    notes = list(found.notes)
    wiring = found.wiring
    target = [n for n in masks if _side(n) == "target"]
    if target and not _is_causal(wiring, sample, sizes):
        for name in sorted(target, key=lambda n: "pad" in n):
            causal, told = causal_form(wiring, name, "target", lambda w: _is_causal(w, sample, sizes))
            if causal is not None:
                wiring = causal
                target.remove(name)
                notes.append(
                    f"{name} is made here, as its caller would: causal, {told}; which form was found by trying"
                )
                break
    source = [n for n in masks if _side(n) in ("source", "memory")]
    x, y = sequence_of(found, sizes), sequence_of(found, sizes)
    x = torch.cat([x, x[:, :2]], dim=1)
    taken: list[str] = []

    def of_two(wiring: Wiring, sample: nn.Module, v: Tensor, mask: Tensor) -> Tensor:
        return wiring.call(sample, v, y, source_mask=mask)

    held = replace(wiring, masks=("source_mask",))
    for form in padding_forms("source_mask", hidden_first=any(hides_where_true(n) for n in source)):
        padding = [n for n in source if "pad" in n] or source
        tried = held.having(**{n: or_none(form[0], "source_mask") for n in padding})
        try:
            is_hidden = padding and _source_is_hidden(tried, sample, sizes, x, of_two)
        except Exception:
            continue
        if is_hidden:
            wiring, taken = tried, padding
            notes.append(f"{', '.join(padding)} is {form[1]}: found by trying which form hides a source position")
            break
    if source and not taken:
        wiring, more = _by_name(held, sample, x, y, source)
        notes += more
    return replace(found, wiring=wiring, mask_forms=("padding",) if wiring.masks else (), notes=tuple(notes))


def _with_memory_mask(found: Understood, sample: nn.Module, sizes: DrawnConfig, masks: list[str]) -> Understood:
    """Return how attention to a memory is called, with the mask `[B, S]` of the memory that it takes."""
    own = replace(found.wiring, masks=("memory_mask",))
    x, memory = sequence_of(found, sizes), sequence_of(found, sizes)
    memory = torch.cat([memory, memory[:, :2]], dim=1)

    def of_two(wiring: Wiring, sample: nn.Module, v: Tensor, mask: Tensor) -> Tensor:
        return wiring.call(sample, x, v, memory_mask=mask)

    for name in sorted(masks, key=lambda n: (_side(n) != "memory", _side(n) == "target", n)):
        for form, told in padding_forms("memory_mask", hidden_first=hides_where_true(name)):
            tried = own.having(**{name: or_none(form, "memory_mask")})
            try:
                if not _source_is_hidden(tried, sample, sizes, memory, of_two):
                    continue
            except Exception:
                continue
            note = f"{name} is {told}: found by trying which form hides a position of the memory"
            return replace(found, wiring=tried, mask_forms=("padding",), notes=(*found.notes, note))
    for name in [n for n in masks if _side(n) == "memory" or "pad" in n]:
        for form, told in padding_forms("memory_mask", hidden_first=hides_where_true(name)):
            tried = own.having(**{name: or_none(form, "memory_mask")})
            try:
                of_two(tried, sample, memory, mask_of(memory, tried))
            except Exception:
                continue
            note = f"{name} is {told} by its name alone: no form of it was seen to hide a position of the memory"
            return replace(found, wiring=tried, mask_forms=("padding",), notes=(*found.notes, note))
    note = f"no memory mask is judged: {', '.join(masks)} hides no position of the memory"
    return replace(found, notes=(*found.notes, note)) if masks else found


def _by_name(held: Wiring, sample: nn.Module, x: Tensor, y: Tensor, source: list[str]) -> tuple[Wiring, list[str]]:
    """Return the call with a source mask in the form that its name has by convention, where it is taken."""
    for form, told in padding_forms("source_mask", hidden_first=any(hides_where_true(n) for n in source)):
        tried = held.having(**{n: or_none(form, "source_mask") for n in source})
        try:
            tried.call(sample, x, y, source_mask=mask_of(x, tried))
        except Exception:
            continue
        return tried, [f"{', '.join(source)} is {told} by its name alone: no form of it was seen to hide a position"]
    return replace(held, masks=()), [f"no source mask is judged: {', '.join(source)} takes none of the usual forms"]


def _source_is_hidden(wiring: Wiring, sample: nn.Module, sizes: DrawnConfig, x: Tensor, run: Run) -> bool:
    mask = mask_of(x, wiring)
    reaches = [reached_by(lambda v: run(wiring, sample, v, mask), x, (0, at), sizes.vocab_size) for at in (HIDDEN, 0)]
    return all(r is not None for r in reaches) and not bool(reaches[0].any()) and bool(reaches[1].any())  # type: ignore[union-attr]


def _side(name: str) -> str:
    words = name.lower().split("_")
    for side, known in (("memory", _MEMORY), ("target", _TARGET), ("source", _SOURCE)):
        if any(word in known for word in words):
            return side
    return "source"


def _is_causal(wiring: Wiring, sample: nn.Module, sizes: DrawnConfig) -> bool:
    x = torch.randint(1, max(sizes.vocab_size, 2), (_B, _T), generator=torch.Generator().manual_seed(4))
    seen = reached_by(lambda v: wiring.call(sample, x, v), x, (0, 2), sizes.vocab_size)
    return seen is not None and seen.ndim == 2 and not bool(seen[0, :2].any()) and bool(seen[0, 2:].all())

"""How a model of two sequences is called, and attention that is given one as queries, keys and values."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from veriformer.properties.adapters.masks import masking
from veriformer.properties.adapters.unknown.arguments import Argument, by_role
from veriformer.properties.adapters.unknown.insisting import called
from veriformer.properties.adapters.unknown.understanding import (
    TWO,
    B,
    NotCalledError,
    T,
    Understood,
    basis,
    embeds,
    first_axis_is_time,
    given_as,
    shape_of,
    time_first,
    tokens_of,
    unknown,
    with_head,
)
from veriformer.properties.adapters.unknown.wiring import Wiring, picks, reached_by
from veriformer.properties.subject.sizes import DrawnConfig

_OF_TARGET = r"(tgt|trg|target|dec)_"
_OPTIONAL_TARGETS = (
    r"(dec|decoder)_?(input_?ids|inputs?|tokens|ids|seq|x)|(tgt|trg|target)s?(_?(seq|ids|tokens|inputs?|in))?"
)


def second_of(arguments: Sequence[Argument], kind: str | None) -> Argument | None:
    """Return the argument that takes the other of two sequences."""
    for role in ("target", "memory"):
        required = [a for a in by_role(arguments, role) if a.is_required]
        if required and kind in (None, *TWO):
            return required[0]
    return next((a for a in optional_second(arguments, kind) if re.match(r"dec", a.name.lower())), None)


def optional_second(arguments: Sequence[Argument], kind: str | None) -> list[Argument]:
    """Return the arguments with a default that may take the target all the same, which a model may shift from labels.

    Those of a decoder by their name take nothing else; a `tgt` may be labels, and is given where nothing else works.
    """
    found = [a for a in arguments[1:] if not a.is_required and re.fullmatch(_OPTIONAL_TARGETS, a.name.lower())]
    return [replace(a, role="target") for a in found] if kind in (None, "encoder_decoder") else []


def only_unknown(arguments: Sequence[Argument], kind: str | None) -> list[Argument]:
    """Return the one argument that is needed and means nothing known, as what may take the target."""
    unknown = [a for a in arguments[1:] if a.is_required and not a.role]
    return [replace(unknown[0], role="target")] if len(unknown) == 1 and kind in (None, "encoder_decoder") else []


def of_attention(sample: nn.Module, sizes: DrawnConfig, arguments: Sequence[Argument], name: str) -> Understood:
    """Find out how an attention of queries, keys and values is called with one sequence; errors as of `understood`."""
    given = {f"*{a.role}": "x" for a in arguments if a.role in ("query", "key", "value")}
    given |= {a.name: "None" for a in arguments if a.is_required and a.role not in ("query", "key", "value")}
    wiring = Wiring(("x",), given)
    x = torch.randn(B, T, sizes.d_model, generator=torch.Generator().manual_seed(0))
    try:
        wiring, output = called(wiring, sample, arguments, x)
    except Exception as problem:
        raise NotCalledError(f"{name} was called with one sequence [{B}, {T}, {sizes.d_model}] as query, key and value "
                             f"and raised {type(problem).__name__}: {problem}; write one") from problem  # fmt: skip
    found = [(w, t) for w, t in picks(output, (B, T), B * T) if tuple(t.shape) == (B, T, sizes.d_model)]
    if not found:
        raise NotCalledError(f"{name} gave {shape_of(output)} for {given_as('embeddings', sizes)}; write a Subject")
    wiring = replace(wiring, pick=found[0][0])
    notes = ["one sequence is given as query, key and value"]
    if time_first(sample, sizes, wiring, x):
        wiring = first_axis_is_time(wiring)
        notes.append("its first axis is time: found by changing one input and seeing which outputs change")
    held = Understood("self_attention", wiring, None, (), tuple(notes))
    return masking.with_mask(held, sample, sizes, arguments, "")


def of_two_sequences(
    sample: nn.Module, sizes: DrawnConfig, kind: str | None, arguments: Sequence[Argument], second: Argument, name: str
) -> Understood:
    """Find out how a model of two sequences is called; `second` is the argument that takes the other one."""
    is_pair = second.role == "target"
    inputs = ("source", "target") if is_pair else ("x", "memory")
    given = basis(arguments, inputs[0], sample) | {second.name: inputs[1]}
    given |= {a.name: given[a.name].replace(inputs[0], inputs[1]) for a in by_role(arguments, "positions")
              if a.name in given and re.match(_OF_TARGET, a.name.lower())}  # fmt: skip
    wiring = Wiring(inputs, given)
    if missing := unknown(arguments, given):
        raise NotCalledError(
            f"{name}.forward needs the argument {missing[0]!r}, of which nothing is known; write a Subject"
        )
    generator = torch.Generator().manual_seed(0)
    if embeds(sample):
        x, y = tokens_of(sizes.vocab_size, B, T), tokens_of(sizes.vocab_size, B, T)
    else:
        x, y = (torch.randn(B, T, sizes.d_model, generator=generator) for _ in range(2))
    try:
        wiring, output = called(wiring, sample, arguments, x, y)
    except Exception as problem:
        raise NotCalledError(f"{name} was called with two sequences [{B}, {T}] and raised {type(problem).__name__}: "
                             f"{problem}; say what it is: --kind KIND, or write a Subject") from problem  # fmt: skip
    found = [(w, t) for w, t in picks(output, (B, T), B * T) if t.ndim == 3]
    if not found and isinstance(output, Tensor) and output.ndim == 2 and len(output) == B * T:
        found = [(f".view(*{inputs[1] if is_pair else inputs[0]}.shape[:2], -1)", output.view(B, T, -1))]
    if not found:
        raise NotCalledError(f"{name} gave {shape_of(output)} for two sequences [{B}, {T}]; write a Subject")
    if len(found) > 1:
        found = _of_the_target(sample, wiring, found, x, y, sizes.vocab_size)
    wiring = replace(wiring, pick=found[0][0])
    notes = [f"of what it gives, output{found[0][0]} is judged"] if found[0][0] else []
    own = "target" if is_pair else "x"
    inputs_with = (lambda v: (x, v)) if is_pair else (lambda v: (v, y))
    seen = reached_by(lambda v: wiring.call(sample, *inputs_with(v)), y if is_pair else x, (1, 0), sizes.vocab_size)
    if seen is not None and seen.ndim == 2 and seen.sum() == seen[:, 0].sum() > 1 and seen[1].sum() == 1:
        wiring = first_axis_is_time(wiring)
        notes.append(f"its first axis is time: found by changing one {own} and seeing which outputs change")
    if is_pair and found[0][1].shape[:2] == (B, T):
        wiring, _, more = with_head(sample, sizes, wiring, x, found[0][1].shape[-1], y)
        notes += more
    told = kind or ("encoder_decoder" if is_pair else "cross_attention")
    return Understood(told, wiring, "tokens" if embeds(sample) and is_pair else None, (), tuple(notes))


def _of_the_target(
    sample: nn.Module, wiring: Wiring, found: list[tuple[str, Tensor]], x: Tensor, y: Tensor, vocab_size: int
) -> list[tuple[str, Tensor]]:
    """Return what follows the length of the second sequence, logits over the vocabulary first; all where none does."""
    try:
        shorter = {w: t.shape for w, t in picks(wiring.call(sample, x, y[:, :-1]), (B, T - 1), B * (T - 1))}
    except Exception:
        return found
    longest = [(w, t) for w, t in found if w in shorter and shorter[w][1] == T - 1] or found
    return sorted(longest, key=lambda one: one[1].shape[-1] not in (vocab_size, vocab_size + 1))

"""The loss that a model gives with its logits: which argument takes the labels, and where in what comes back it is."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from veriformer.properties.adapters.beside.offers import Offer, tried
from veriformer.properties.adapters.unknown.arguments import Argument
from veriformer.properties.adapters.unknown.wiring import Wiring

_LABELS = r"(lm_|mlm_|masked_lm_|next_)?(labels?|targets?|tgts?|trg|target_ids|label_ids|next_tokens|gold|y|y_true)"
_METHODS = ("loss", "compute_loss", "get_loss", "calc_loss", "calculate_loss", "lm_loss", "loss_fn")
_MOVED_INSIDE = r"(lm_)?labels?|label_ids"
"""Names that by the convention of Hugging Face are given as the tokens are, and moved by one inside."""
_MOVED_ALREADY = r"targets?|tgts?|target_ids|next_tokens|gold|y_true"
"""Names that by the convention of minGPT are given what each output is to foretell, moved by whoever made them."""


def loss_beside(sample: nn.Module, kind: str, wiring: Wiring, arguments: Sequence[Argument],
                inputs: tuple[Tensor, ...], logits: Tensor) -> Offer | None:  # fmt: skip
    """Return the loss of a model as `loss(model, *inputs, labels)`, or None where it has none.

    Args:
        sample: in eval mode.
        kind: of subject.
        wiring: how its forward is called.
        arguments: of its forward.
        inputs: that it takes.
        logits: that it gives for them `[B, T, V]`, or `[B, C]` of a classifier.
    """
    size = logits.shape[-1]
    shape = logits.shape[:-1]
    if size < 3 or logits.ndim not in (2, 3):
        return None
    labels = torch.randint(0, size, shape, generator=torch.Generator().manual_seed(5))
    other = (labels + 1) % size
    names = [a.name for a in arguments[1:] if re.fullmatch(_LABELS, a.name.lower()) and a.name != wiring_target(wiring)]
    for told, source in _sources(sample, kind, wiring, names):
        try:
            values = [tried(source, "loss", {}, sample, *inputs, y) for y in (labels, other)]
        except Exception:
            continue
        for pick, value in _scalars(values[0]):
            second = dict(_scalars(values[1])).get(pick)
            if second is None or not bool(value.isfinite().all()) or torch.equal(value, second):
                continue
            written = source.replace("return output\n", f"return output{pick}{'.reshape(())' * value.ndim}\n")
            said = {_MOVED_INSIDE: True, _MOVED_ALREADY: False} if kind == "decoder" else {}
            moves = next((moves for names, moves in said.items() if re.fullmatch(names, told.lower())), None)
            guesses = {"shifts_labels": True} if told.endswith("(tokens)") else {}
            guesses |= {} if moves is None else {"shifts_labels": moves}
            note = f"its own loss is judged: what it gives for {told}=labels, output{pick}".rstrip()
            return Offer("loss", written, (note.removesuffix(", output"),), guesses)
    return None


def wiring_target(wiring: Wiring) -> str:
    """Return the name of the argument that takes the target of two sequences; "" of one."""
    return next((name for name, value in wiring.given.items() if value.startswith("target")), "")


def _sources(sample: nn.Module, kind: str, wiring: Wiring, names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the argument, or method, that takes labels, and the source of a call of it."""
    turned = "labels.transpose(0, 1)" if ".transpose(0, 1)" in wiring.pick else "labels"
    heads = ", ".join(["model", *wiring.inputs, "labels"])
    before = [*wiring.before]
    for name in names:
        given = {**wiring.given, name: turned}
        words = ", ".join(v if n.startswith("*") else f"{n}={v}" for n, v in given.items())
        yield name, _source(heads, before, f"{wiring.target}({words})")
    for name in _METHODS:
        if callable(getattr(sample, name, None)) and not isinstance(getattr(sample, name), nn.Module):
            words = ", ".join([*wiring.inputs, turned])
            yield f"{name}()", _source(heads, before, f"model.{name}({words})")
    if kind in ("decoder", "encoder_decoder") and wiring.target == "model" and not wiring.around:
        yield from _of_own_tokens(sample, wiring)


_OF_OWN_TOKENS = """def loss({heads}):
    forward, told, seen = model.forward, [], {tokens}

    def own(given):
        of = given.untyped_storage().data_ptr() if isinstance(given, torch.Tensor) else None
        if of != labels.untyped_storage().data_ptr():
            return given
        told.append(given)
        start = (given.storage_offset() - labels.storage_offset()) % labels.shape[1]
        return seen[:, start : start + given.shape[1]]

    model.forward = lambda *args, **given: forward(*map(own, args), **{{n: own(v) for n, v in given.items()}})
    try:
        output = model.{name}({words})
    finally:
        del model.forward
    if not told:
        raise TypeError("its forward was not given the tokens")
    return output
"""


def _of_own_tokens(sample: nn.Module, wiring: Wiring) -> Iterator[tuple[str, str]]:
    """Yield the call of a loss that takes tokens alone and foretells them: what it foretells is told from what it sees.

    The forward inside sees the tokens; what the loss is handed, and scores by, are labels.
    """
    tokens = wiring.inputs[-1]
    if any(line.startswith(f"{tokens} =") for line in wiring.before) or wiring.pick.endswith("[:, 1:]"):
        return
    names = list(inspect.signature(sample.forward).parameters)
    sources = dict(zip([n for n in wiring.given if n.startswith("*")], names, strict=False))
    given = {sources.get(n, n): v for n, v in wiring.given.items()}
    for method in _METHODS:
        function = getattr(sample, method, None)
        if not inspect.ismethod(function):
            continue
        required = [p.name for p in inspect.signature(function).parameters.values() if p.default is p.empty]
        by_name = [given.get(n) for n in required]
        by_place = [given[n] for n in names if (n in given and tokens in given[n]) or n in required][: len(required)]
        words = by_name if all(by_name) else by_place
        if len(words) != len(required) or sum(w == tokens for w in words) != 1:
            continue
        called = ", ".join("labels" if w == tokens else str(w) for w in words)
        heads = ", ".join(["model", *wiring.inputs, "labels"])
        source = _OF_OWN_TOKENS.format(heads=heads, tokens=tokens, name=method, words=called)
        yield f"{method}(tokens)", f"import torch\n\n\n{source}"


def _source(heads: str, before: Sequence[str], called: str) -> str:
    body = "".join(f"    {line}\n" for line in [*before, f"output = {called}", "return output"])
    text = f"def loss({heads}):\n{body}"
    return f"import torch\n\n\n{text}" if "torch." in text else text


def _scalars(output: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the numbers in what a model gave, each with the source that takes it, one that is called a loss first."""
    found = [(w, t) for w, t in _parts(output) if isinstance(t, Tensor) and t.numel() == 1 and t.is_floating_point()]
    yield from sorted(found, key=lambda one: ("loss" not in one[0], "total" not in one[0]))


def _parts(output: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(output, Tensor):
        yield "", output
    elif isinstance(output, Mapping):
        yield from ((f"[{n!r}]", v) for n, v in output.items())
    elif isinstance(output, tuple | list) and not hasattr(output, "_fields"):
        yield from ((f"[{i}]", v) for i, v in enumerate(output))
    else:
        names = getattr(output, "_fields", None) or list(getattr(output, "__dict__", {}))
        yield from ((f".{n}", getattr(output, n, None)) for n in names)

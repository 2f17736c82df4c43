"""Causal masks that a model does not make: its caller gives them, and so do we where code beside it says so."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from veriformer.properties.adapters.masks.forms import pairwise_forms
from veriformer.properties.adapters.places import lies_in_a_library, location
from veriformer.properties.adapters.unknown.wiring import Wiring, reached_by
from veriformer.properties.subject.sizes import DrawnConfig

if TYPE_CHECKING:
    from veriformer.properties.adapters.unknown.understanding import Understood

_MAKES = re.compile(r"\b(tril|triu|tril_|triu_|subsequent_mask|generate_square_subsequent_mask)\b")
_FILES, _BYTES = 40, 400_000
"""Files beside a model that are read, and bytes of each."""


def causal_form(
    wiring: Wiring, name: str, length_of: str, is_causal: Callable[[Wiring], bool]
) -> tuple[Wiring | None, str]:
    """Return the call with a causal mask in the form that an argument takes, and what the form is; None without one.

    Args:
        wiring: the call.
        name: of the argument.
        length_of: the input that the mask is as long as.
        is_causal: whether a call sees the past and not the future.
    """
    size = f"{length_of}.shape[1]"
    lower = f"torch.ones({size}, {size}, dtype=torch.bool, device={length_of}.device).tril()"
    for form, told in pairwise_forms("lower", hidden_first=False):
        tried = replace(wiring.having(**{name: form}), before=(*wiring.before, f"lower = {lower}"))
        try:
            if is_causal(tried):
                return tried, told
        except Exception:
            continue
    return None, ""


def with_causal_mask(
    found: Understood, sample: nn.Module, sizes: DrawnConfig, names: Sequence[str], x: Tensor
) -> Understood | None:
    """Return how a decoder is called that has a causal mask from its caller; None where it makes one, or none does.

    Args:
        found: how it is called without.
        sample: a model.
        sizes: of it.
        names: of its arguments that may be masks.
        x: what it takes.
    """
    if found.kind != "decoder" or not names:
        return None
    last = x.shape[1] - 1

    def seen(wiring: Wiring, at: int) -> Tensor | None:
        return reached_by(lambda v: wiring.call(sample, v), x, (0, at), sizes.vocab_size)

    def is_causal(wiring: Wiring) -> bool:
        late, early = seen(wiring, last), seen(wiring, 0)
        return (
            late is not None and early is not None and late.ndim == 2
            and not bool(late[0, :last].any()) and bool(early[0].all())
        )  # fmt: skip

    without = seen(found.wiring, last)
    if without is None or not bool(without[0].all()):
        return None
    if not any(_MAKES.search(text) for text in _beside(sample)):
        return None
    for name in sorted(names, key=lambda n: "pad" in n):
        wiring, told = causal_form(found.wiring, name, found.wiring.inputs[0], is_causal)
        if wiring is not None:
            note = f"{name} is made here, as its caller would: causal, {told}; which form was found by trying"
            return replace(found, wiring=wiring, notes=(*found.notes, note))
    return None


def in_place_of_its_own(
    own: Wiring, masked: Wiring, sample: nn.Module, sizes: DrawnConfig, name: str, x: Tensor
) -> tuple[Wiring, str] | None:
    """Return the call with one mask for past and padding, and what it is, where the one that is given replaces both.

    Args:
        own: the call without a mask, which sees the past alone.
        masked: the call with a padding mask, under which the future is seen.
        sample: a model.
        sizes: of it.
        name: of the argument.
        x: what it takes.
    """
    last = x.shape[1] - 1
    every = torch.ones(x.shape[:2], dtype=torch.bool)
    some = every.clone()
    some[:, 1] = False

    def sees_the_future(wiring: Wiring, mask: Tensor | None) -> bool | None:
        seen = reached_by(lambda v: wiring.call(sample, v, attention_mask=mask), x, (0, last), sizes.vocab_size)
        return None if seen is None or seen.ndim != 2 else bool(seen[0, :last].any())

    if sees_the_future(own, None) is not False or sees_the_future(masked, every) is not True:
        return None
    of, size = own.inputs[0], f"{own.inputs[0]}.shape[1]"
    lower = f"lower = torch.ones({size}, {size}, dtype=torch.bool, device={of}.device).tril()"
    alone = f"itself = torch.eye({size}, dtype=torch.bool, device={of}.device)  # no row of a softmax is empty"
    for shape, axes in (("[:, None]", "[B, 1, T, T]"), ("", "[B, T, T]")):
        both = f"(attention_mask[:, None] & lower | itself){shape}"
        for form, told in (
            (both, "bool, True = may attend"),
            (f"~{both}", "bool, True = masked"),
            (f"torch.where({both}, 0.0, float('-inf'))", "float, -inf = masked"),
        ):
            given = own.having(**{name: f"None if attention_mask is None else {form}"})
            tried = replace(given, before=(*own.before, lower, alone))
            try:
                hidden = reached_by(
                    lambda v, w=tried: w.call(sample, v, attention_mask=some), x, (0, 1), sizes.vocab_size
                )
                if sees_the_future(tried, every) is False and hidden is not None and not bool(hidden[0, 2:].any()):
                    return tried, f"takes the place of its own causal mask, so it is both in one, {axes} of {told}"
            except Exception:
                continue
    return None


def _masked_call(wiring: Wiring, sample: nn.Module, mask: Tensor, x: Tensor) -> Tensor:
    return wiring.call(sample, x, attention_mask=mask)


def _beside(sample: nn.Module) -> list[str]:
    """Return the source of the model's own modules and of the files in their folders, but for what it is built of.

    A model whose own code makes a causal mask and does not use it has lost it: what stands in its classes says nothing.
    """
    own = {type(m).__module__ for m in sample.modules()}
    files = {Path(location(sys.modules[name])) for name in own if name in sys.modules}
    files = {file for file in files if file.suffix == ".py" and not lies_in_a_library(str(file))}
    folders = {file.parent for file in files if file.is_file()}
    classes = {type(m) for m in sample.modules()}
    texts = []
    for file in sorted(path for folder in folders for path in folder.glob("*.py"))[:_FILES]:
        text = file.read_text(encoding="utf-8", errors="replace")[:_BYTES]
        for cls in classes:
            try:
                text = text.replace(inspect.getsource(cls), "")
            except (OSError, TypeError):
                continue
        texts.append(text)
    return texts

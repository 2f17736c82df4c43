"""Which masks a model takes, in which form and with which polarity: told by what a mask hides, then by its name."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from veriformer.properties.adapters.masks.caller_made import in_place_of_its_own, with_causal_mask
from veriformer.properties.adapters.masks.forms import padding_forms, pairwise_forms
from veriformer.properties.adapters.masks.padding_tokens import by_token_of_one
from veriformer.properties.adapters.unknown.arguments import Argument, by_role, hides_where_true
from veriformer.properties.adapters.unknown.wiring import ALL, Wiring, or_all, reached_by
from veriformer.properties.subject.sizes import DrawnConfig

if TYPE_CHECKING:
    from veriformer.properties.adapters.unknown.understanding import Understood

_B, _T, HIDDEN = 3, 5, 1


def with_mask(
    found: Understood, sample: nn.Module, sizes: DrawnConfig, arguments: Sequence[Argument], padding_id: str
) -> Understood:
    """Return how a model of one sequence is called, with the padding mask that it takes."""
    names = [a.name for a in by_role(arguments, "mask")]
    names.sort(key=lambda n: ("pad" not in n and n != "attention_mask", n))
    own = replace(found.wiring, masks=("attention_mask",))
    x = sequence_of(found, sizes)
    if (causal := with_causal_mask(found, sample, sizes, names, x)) is not None:
        return causal
    unread: list[str] = []
    for name in names:
        told, wiring, acting = _hiding(own, sample, sizes, x, name, "attention_mask", _of_one)
        is_a_part = found.kind in ("self_attention", "layer")
        if (
            wiring is not None
            and "-inf" in told
            and is_taken_from_one(sample)
            and (weak := _of_ones(own, sample, x, name))
        ):
            wiring = own.having(**{name: or_none(weak[0], "attention_mask", own.given.get(name, ""))})
            note = f"{name} is {weak[1]}: its code takes it from 1, though that was not seen to hide a position wholly"
            return replace(found, wiring=wiring, mask_forms=("padding",), notes=(*found.notes, note))
        if wiring is not None and told:
            note = f"{name} is {told}: found by trying which form hides a position"
            if (whole := in_place_of_its_own(own, wiring, sample, sizes, name, x)) is not None:
                wiring, note = whole[0], f"{name} {whole[1]}; given {told} every position would see the future"
            return replace(found, wiring=wiring, mask_forms=("padding",), notes=(*found.notes, note))
        if acting is not None and (is_a_part or "[B, 1" in acting[1]):
            note = f"{name} is {acting[1]}, by what it changes alone: no form of it was seen to hide a position"
            return replace(found, wiring=acting[0], mask_forms=("padding",), notes=(*found.notes, note))
        if wiring is not None:
            unread.append(name)
    by_token = by_token_of_one(found, sample, sizes, padding_id, sequence_of(found, sizes))
    if by_token is not None:
        return by_token
    for name in unread:
        form, told = next(_taken(own, sample, x, name))
        is_ignored = found.kind in ("self_attention", "layer") and not _changes_anything(own, sample, x, name)
        if "pad" in name or name == "attention_mask" or is_ignored:
            note = f"{name} is {told} by its name alone: no form of it was seen to hide a position"
            wiring = own.having(**{name: or_none(form, "attention_mask", own.given.get(name, ""))})
            return replace(found, wiring=wiring, mask_forms=("padding",), notes=(*found.notes, note))
    if unread or names:
        note = f"no padding mask is judged: {', '.join(names)} hides nothing as one"
        return replace(found, notes=(*found.notes, note))
    return found


def is_taken_from_one(sample: nn.Module) -> bool:
    """Whether a model's code takes a mask from 1, `(1 - mask) * -1e4`: then 1 = may attend, however little it hides.

    An infinite number hides a position there as well, since all that is done to it leaves it infinite.
    """
    for cls in {type(m) for m in sample.modules() if not type(m).__module__.startswith("torch.")}:
        try:
            text = inspect.getsource(cls)
        except (OSError, TypeError):  # it was not made of a file
            continue
        if re.search(r"\b1(\.0?)?\s*-\s*[\w.]*mask", text):
            return True
    return False


def _of_ones(own: Wiring, sample: nn.Module, x: Tensor, name: str) -> tuple[str, str] | None:
    """Return the first form of ones and zeros that a model does not refuse, and what it is."""
    return next(((form, told) for form, told in _taken(own, sample, x, name) if "may attend" in told), None)


def sequence_of(found: Understood, sizes: DrawnConfig) -> Tensor:
    """Return a sequence that a model takes, `[B, T]` or `[B, T, D]`."""
    generator = torch.Generator().manual_seed(2)
    if found.inputs == "tokens":
        return torch.randint(1, max(sizes.vocab_size, 2), (_B, _T), generator=generator)
    return torch.randn(_B, _T, sizes.d_model, generator=generator)


Run = Callable[[Wiring, nn.Module, Tensor, Tensor], Tensor]


def _of_one(wiring: Wiring, sample: nn.Module, x: Tensor, mask: Tensor) -> Tensor:
    return wiring.call(sample, x, attention_mask=mask)


def _taken(own: Wiring, sample: nn.Module, x: Tensor, name: str) -> Any:
    """Yield the forms of a mask that a model does not refuse."""
    for form, told in padding_forms("attention_mask", hidden_first=hides_where_true(name)):
        try:
            tried = own.having(**{name: or_none(form, "attention_mask", own.given.get(name, ""))})
            tried.call(sample, x, attention_mask=mask_of(x, own))
        except Exception:
            continue
        yield form, told


def mask_of(x: Tensor, wiring: Wiring) -> Tensor:
    """Return a mask `[B, T]` that hides one position of every sample."""
    mask = torch.ones(x.shape[:2], dtype=torch.bool)
    mask[:, HIDDEN] = False
    return mask


def or_none(form: str, mask: str, given: str = "") -> str:
    """Return the source of a form of a mask; where there is none None, or one that hides nothing if that was given."""
    if ALL in given:
        return form.replace(mask, or_all(mask))
    return form if form == mask else f"None if {mask} is None else {form}"


def _hiding(
    own: Wiring, sample: nn.Module, sizes: DrawnConfig, x: Tensor, name: str, mask: str, run: Run
) -> tuple[str, Wiring | None, tuple[Wiring, str] | None]:
    """Return the form of a mask that hides a position, and the call with it; ("", call) where one is only taken.

    And where one changes what is given without hiding anything, the call with that, and what it is: one of the shape of
    scores before others, since it can be nothing but a mask of them.
    """
    taken: Wiring | None = None
    acting: tuple[Wiring, str] | None = None
    for form, told in padding_forms(mask, hidden_first=hides_where_true(name)):
        wiring = own.having(**{name: or_none(form, mask, own.given.get(name, ""))})
        try:
            if hides(wiring, sample, sizes, x, run):
                return told, wiring, None
            if (acting is None or "[B, 1" not in acting[1]) and _acts(wiring, sample, x, run):
                acting = acting if acting and "[B, 1" not in told else (wiring, told)
        except Exception:
            continue
        taken = taken or wiring
    return "", taken, acting


def _changes_anything(own: Wiring, sample: nn.Module, x: Tensor, name: str) -> bool:
    """Whether any mask, of padding or of pairs of positions, changes what is given, or is refused."""
    lower = "torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()"
    forms = [*padding_forms("attention_mask", hidden_first=False), *pairwise_forms(lower, hidden_first=False)]
    before = own.call(sample, x, attention_mask=None)
    for form, _ in forms:
        try:
            after = own.having(**{name: or_none(form, "attention_mask")}).call(
                sample, x, attention_mask=mask_of(x, own)
            )
        except Exception:
            return True
        if not isinstance(after, Tensor) or not torch.equal(before, after):
            return True
    return False


def _acts(wiring: Wiring, sample: nn.Module, x: Tensor, run: Run) -> bool:
    """Whether hiding a position changes numbers, and gives numbers."""
    everything = torch.ones(x.shape[:2], dtype=torch.bool)
    before, after = (run(wiring, sample, x, mask) for mask in (everything, mask_of(x, wiring)))
    return isinstance(after, Tensor) and bool(after.isfinite().all()) and not torch.equal(before, after)


def hides(wiring: Wiring, sample: nn.Module, sizes: DrawnConfig, x: Tensor, run: Run) -> bool:
    """Whether a masked position reaches no other one of its sample, and one that is not masked does."""
    mask = mask_of(x, wiring)
    reaches = [reached_by(lambda v: run(wiring, sample, v, mask), x, (0, at), sizes.vocab_size) for at in (HIDDEN, 0)]
    if any(r is None for r in reaches):
        return False
    hidden, shown = (r[0].clone() for r in reaches if r is not None)
    if hidden.shape[0] == x.shape[1]:
        hidden[HIDDEN] = False
        shown[0] = False
    return not bool(hidden.any()) and bool(shown.any())

"""Two towers, whose outputs compare every sample of one side with every one of the other, or are one number for all."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from veriformer.properties.adapters.shapes.images import IMAGES, TEXTS, image_shapes
from veriformer.properties.adapters.unknown.arguments import Argument
from veriformer.properties.adapters.unknown.understanding import B, T, Understood, basis, embeds, tokens_of, unknown
from veriformer.properties.adapters.unknown.wiring import Wiring, tensors_in
from veriformer.properties.subject.sizes import DrawnConfig

_FIXED = 2
"""Samples of the other side, always the same; fewer than of the side that is judged: the axes are told apart."""
_FIRST = r"(input_?ids|tokens?|ids|text|x)?_?(q|query|queries|questions?|anchors?|a|1|left|src|source|premise)" \
         r"(_?(ids|input_ids|tokens|text|seq|x))?"  # fmt: skip
_SECOND = r"(input_?ids|tokens?|ids|text|x)?_?(d|docs?|documents?|passages?|p|positives?|pos|answers?|b|2|right|keys?" \
          r"|contexts?|hypothesis|candidates?|responses?)(_?(ids|input_ids|tokens|text|seq|x))?"  # fmt: skip
_LOSSES = ("", "[0]", ".loss", "['loss']")
"""Where a loss may stand in what a model gives."""


def of_two_towers(sample: nn.Module, sizes: DrawnConfig, arguments: Sequence[Argument]) -> Understood | None:
    """Return the call of a model that compares samples of two sides, by which one side is judged; None of others.

    Its output compares `[N, M]`, or is a loss over the batch, so that samples meet by design. The other side is given
    a few samples that are always the same; what each sample of the one side scores with these is its alone. A loss is
    asked for each sample beside others that are always the same.
    """
    if not embeds(sample):
        return None
    for own, other, fixed in _sides(sample, arguments):
        rest = [a for a in arguments if a is not own and a is not other]
        first = Argument(own.name, "first", is_required=True)
        given = basis([first, *rest], "x", sample)
        if unknown([first, *rest], given):
            continue
        named = {n: v for n, v in given.items() if not n.startswith("*")}
        both = Wiring(("x",), {own.name: "x", other.name: fixed, **named})
        found = _compared(sample, sizes, both, own.name, other.name)
        if found is None and _meets_in_a_number(sample, sizes, both):
            found = _one_by_one(sample, sizes, both, own.name, other.name)
        if found is not None:
            return found
    return None


def _sides(sample: nn.Module, arguments: Sequence[Argument]) -> Iterator[tuple[Argument, Argument, str]]:
    """Yield the argument that is judged, the other one, and the source of what that is given: N samples as of x."""
    image = next((a for a in arguments if re.fullmatch(IMAGES, a.name.lower())), None)
    text = next((a for a in arguments if a is not image and re.fullmatch(TEXTS, a.name.lower())), None)
    if image is not None and text is not None:
        for c, height, width in image_shapes(sample):
            pixels = f"torch.arange(N * {c * height * width}, device=x.device).float().sin()"
            made = f"{pixels}.view(N, {c}, {height}, {width}).to(next(model.parameters()).dtype)"
            yield text, image, made
    needed = [a for a in arguments if a.is_required]
    first = next((a for a in needed if re.fullmatch(_FIRST, a.name.lower())), None)
    second = next((a for a in needed if a is not first and re.fullmatch(_SECOND, a.name.lower())), None)
    if first is not None and second is not None and image is None:
        yield first, second, f"(torch.arange(N * {T}, device=x.device) * 5 % 7 + 1).view(N, {T})"


def _run(sample: nn.Module, wiring: Wiring, x: Tensor, count: int) -> Any:
    try:
        return replace(wiring, given=_with_count(wiring.given, count)).call(sample, x)
    except Exception:
        return None


def _with_count(given: Mapping[str, str], count: int) -> dict[str, str]:
    return {n: re.sub(r"\bN\b", str(count), v) for n, v in given.items()}


def _compared(sample: nn.Module, sizes: DrawnConfig, both: Wiring, own: str, other: str) -> Understood | None:
    """Return the call that gives scores `[B, N]` of each sample with the N fixed ones; None where none come out."""
    x = tokens_of(sizes.vocab_size, B, T)
    for where, scores in tensors_in(_run(sample, both, x, _FIXED)):
        if tuple(scores.shape) not in ((B, _FIXED), (_FIXED, B)) or not scores.is_floating_point():
            continue
        more = dict(tensors_in(_run(sample, both, tokens_of(sizes.vocab_size, B + 2, T), _FIXED + 1))).get(where)
        turned = tuple(scores.shape) == (_FIXED, B)
        if more is None or tuple(more.shape) != ((_FIXED + 1, B + 2) if turned else (B + 2, _FIXED + 1)):
            continue
        note = (
            f"compares every {own} with every {other}: judged is output{where}{'.mT' if turned else ''}, what each "
            f"{own} scores with {_FIXED} of {other} that are always the same"
        )
        if _sums_to_one_over(scores.mT if turned else scores):
            told = f"{note}, beside {_FIXED} of {own} that are: its scores sum to one over the samples of a batch"
            return _one_by_one(sample, sizes, both, own, other, (where + ("[:, 0]" if turned else "[0]"), told))
        wiring = replace(both, given=_with_count(both.given, _FIXED), pick=where + (".mT" if turned else ""))
        return Understood("classifier", wiring, "tokens", (), (note,))
    return None


def _sums_to_one_over(scores: Tensor) -> bool:
    """Whether `[B, N]` are weights that sum to one over the samples, and not over the fixed ones."""
    return bool((scores >= 0).all()) and torch.allclose(scores.sum(0), torch.ones(scores.shape[1]), atol=1e-4)


def _meets_in_a_number(sample: nn.Module, sizes: DrawnConfig, both: Wiring) -> bool:
    """Whether as many samples of either side give one number before all else."""
    found = tensors_in(_run(sample, both, tokens_of(sizes.vocab_size, B, T), B))
    return any(t.numel() == 1 for _, t in found) and not any(t.shape[:2] == (B, T) for _, t in found)


def _one_by_one(
    sample: nn.Module, sizes: DrawnConfig, both: Wiring, own: str, other: str, picked: tuple[str, str] | None = None
) -> Understood | None:
    """Return the call that asks for each sample beside others that are always the same; None where that fails.

    Args:
        sample: in eval mode.
        sizes: of it.
        both: the call with two sides.
        own: argument that takes the side that is judged.
        other: that takes the other one.
        picked: where what is meant stands in what comes out, and what to say; None: it is the number of a batch.
    """
    count = _FIXED if picked else _FIXED + 1
    beside = f"((torch.arange({_FIXED} * x.shape[1], device=x.device) * 5).view({_FIXED}, -1) % 7 + 1)"
    words = ", ".join(f"{n}={v}" for n, v in _with_count(both.given, count).items() if n != own)
    told = picked[1] if picked else (
        f"gives one number for a batch, whose samples meet by design: judged is that of each {own}, first of "
        f"{count} pairs of which the others, and every {other}, are always the same"
    )  # fmt: skip
    for pick in (picked[0],) if picked else _LOSSES:
        each = f"model({own}=torch.cat([one[None], {beside}]), {words}){pick}.flatten()"
        wiring = Wiring(("x",), {"*all": f"[{each} for one in x]"}, target="torch.stack")
        try:
            output = wiring.call(sample, tokens_of(sizes.vocab_size, B, T))
        except Exception:
            continue
        if tuple(output.shape) == (B, count if picked else 1) and output.is_floating_point():
            return Understood("classifier", wiring, "tokens", (), (told,))
    return None

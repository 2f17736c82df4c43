"""Why heads inside a model have another scale: a formula is named where it holds at every size that is looked at."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from veriformer.properties.anatomy.attention import Attention, followed
from veriformer.properties.anatomy.flow import Flow, of_other_sizes
from veriformer.properties.anatomy.sources import Head
from veriformer.properties.anatomy.traced import Traced
from veriformer.properties.engine.case import Case
from veriformer.properties.subject.facts import attention_scale

NEAR = 1e-3
"""A scale further off, relatively, is another one: float32 constants and a fit in float32 err by 1e-4 at most."""

_FURTHER = 3  # other sizes at which formulas are held against the scale that is there: d_head = sqrt(d_model) is common


@dataclass(frozen=True)
class _Sizes:
    """Sizes of one model, and what its scale is to be."""

    d_head: int
    d_model: int
    length: int
    keys: int
    filled: int
    right: float


@dataclass(frozen=True)
class _Formula:
    """A scale that is known for a mistake: of every head, or of some alone."""

    value: Callable[[_Sizes], float]
    of_all: str
    of_some: str


_OF_KEYS = _Formula(lambda s: s.keys**-0.5, "1/sqrt(S), of the number of keys in place of channels", "it is 1/sqrt(S)")
_FORMULAS = (
    _OF_KEYS,
    _Formula(lambda s: s.length**-0.5, "1/sqrt(T), of the number of tokens in place of channels", "it is 1/sqrt(T)"),
    _Formula(lambda s: 1.0, "1: the scores are not scaled at all", "it is not scaled at all"),
    _Formula(lambda s: 1 / s.d_head, "1/d_head: the scores are scaled twice", ""),
    _Formula(lambda s: s.right * s.d_head**-0.5, "", "it is scaled once more"),
    _Formula(lambda s: s.right * s.d_head**-0.25, "", "it is scaled once more"),  # queries or keys alone
    _Formula(
        lambda s: s.d_model**-0.5,
        "1/sqrt(d_model) in place of 1/sqrt(d_head)",
        "it is 1/sqrt(d_model) in place of 1/sqrt(d_head)",
    ),
    _Formula(lambda s: s.d_head**0.5, "sqrt(d_head): multiplied where it should be divided", "it is sqrt(d_head)"),
)
_FILLED = _Formula(lambda s: s.filled**-0.5, "", "")  # a fused kernel wants even widths

Name = tuple[str, int, int, int]
"""A head: path of its attention, its number, how many there are, their channels."""


def scale_cause(lone: list[Name], names: list[Name], seen: float, right: float, d_head: int, flowing: Flow) -> str:
    """Say what the scale is, and whose.

    Args:
        lone: heads whose scale is another one than declared.
        names: all heads.
        seen: the scale of the one that is furthest off.
        right: what it is to be.
        d_head: channels of its head.
        flowing: the forward in which it was seen.
    """
    if told := _by_layer(flowing):
        return told
    place = lone[0][0]
    is_of_all = len(lone) == len(names)
    own = [a for a in followed(flowing.seen) if a.place == place]
    filled, keys = max((a.filled for a in own), default=0), own[0].hidden.shape[-1] if own else flowing.length
    sizes = _Sizes(d_head, flowing.width, flowing.length, keys, filled, right)
    plain = f"{seen / right:.4g} times the right one"
    known = [f for f in _FORMULAS if (f.of_all if is_of_all else f.of_some) and _holds(f, seen, sizes)]
    known = [f for f in known if abs(right / f.value(sizes) - 1) > NEAR]
    if not known and filled > d_head and _holds(_FILLED, seen, sizes):
        told = f"1/sqrt({filled}): that of heads filled up with zeros from {d_head} channels to {filled}"
        return f"{_whose(lone, names)} is {told}"
    if known:
        known = _at_other_sizes(known, place, is_of_all, flowing)
    if sizes.keys == sizes.length:  # of one sequence, of which the one is the other
        known = [f for f in known if f is not _OF_KEYS]
    words = dict.fromkeys(f.of_all if is_of_all else f.of_some for f in known)
    if len(words) != 1:
        return f"{_whose(lone, names)} is {plain}"
    (told,) = words
    return f"{_whose(lone, names)} is {told if is_of_all else f'{plain}: {told}'}"


def _by_layer(flowing: Flow) -> str | None:
    """Say that scales go with the number of the layer, where they do in models of several sizes."""
    others = (of_other_sizes(flowing, config) for config in flowing.case.bench.configs[1 : 1 + _FURTHER])
    seen = [ratios for one in (flowing, *others) if one and len(ratios := _ratios(one)) > 1]
    for told, power in (
        ("divided by the number of its layer, 1, 2 ...: what is divided is not multiplied back", -1),
        ("multiplied by the number of its layer, 1, 2 ...: what is multiplied was not divided", 1),
    ):
        if len(seen) > 1 and all(
            abs(ratio / (n + 1) ** power - 1) < NEAR for ratios in seen for n, ratio in enumerate(ratios)
        ):
            return f"the scale of each attention is {told}"
    return None


def _ratios(flowing: Flow) -> list[float]:
    """Return the scale of each attention as a multiple of the declared one; nothing where one of them has several."""
    declared, found = flowing.case.subject.fact("attention_scale"), list[float]()
    for one in followed(flowing.seen):
        scales = [s / attention_scale(declared, one.query.shape[-1], flowing.width) for s in one.scale if s is not None]
        if not scales or max(scales) - min(scales) > NEAR * max(scales):
            return []
        found.append(float(scales[0]))
    return found


def _whose(lone: list[Name], names: list[Name]) -> str:
    if len(lone) == len(names):
        return "the measured scale of every head"
    if len(lone) == 1:
        return f"the measured scale of head {lone[0][1]} in {lone[0][0] or 'the model'} alone"
    heads, places = {head for _, head, *_ in lone}, sorted({place for place, *_ in lone} - {""})
    number = f"head {lone[0][1]}" if len(heads) == 1 else f"{len(lone)} of {len(names)} heads"
    return f"the measured scale of {number}{', in ' if places else ''}{', '.join(places)} alone"


def _holds(formula: _Formula, seen: float, sizes: _Sizes) -> bool:
    return abs(seen / formula.value(sizes) - 1) < NEAR


def _at_other_sizes(known: list[_Formula], place: str, is_of_all: bool, flowing: Flow) -> list[_Formula]:
    """Return those of the formulas that the scales of the same attention follow in models of other sizes, too."""
    declared, left = flowing.case.subject.fact("attention_scale"), known
    for config in flowing.case.bench.configs[1 : 1 + _FURTHER]:
        if len(left) < 2:
            break
        other = of_other_sizes(flowing, config)
        found = [a for a in followed(other.seen) if a.place == place] if other else []
        if not found or other is None:
            continue
        d_head = found[0].query.shape[-1]
        right = attention_scale(declared, d_head, other.width)
        sizes = _Sizes(d_head, other.width, other.length, found[0].hidden.shape[-1], found[0].filled, right)
        scales = [s for a in found for s in a.scale if s is not None]
        odd = [s for s in scales if is_of_all or abs(s / right - 1) > NEAR]
        left = [f for f in left if odd and all(_holds(f, s, sizes) for s in odd[:1])] or left
    return left


def products_have_the_scale(case: Case, flowing: Flow) -> None:
    """Ask where heads that are put together of several parts are scaled by the width of one of them alone.

    Where each part comes from is not known then, and whether it was scaled before: of the products themselves the
    factor is seen, and one that is no root of a smaller width says nothing.
    """
    names = [(a.place, h, len(a.scale), a.query.shape[-1]) for a, h in joined(flowing.seen)]
    parts = case.apply(parts_scaled_by, flowing.seen)
    if not names:
        return
    place, head, heads, width = names[int(parts.argmax())]
    part, declared = int(parts.max()), attention_scale(case.subject.fact("attention_scale"), width, flowing.width)
    if abs(declared * width**0.5 - 1) > NEAR:
        return
    case.require(
        parts.max() == 0,
        f"in {place or 'the model'} head {head} of {heads}, put together of several parts, multiplies q k^T by "
        f"1/sqrt({part}), not by 1/sqrt({width})",
        got=f"{max(part, 1) ** -0.5:.6g}",
        expected=f"{width**-0.5:.6g}",
        cause=lambda: (
            f"the scale is 1/sqrt({part}), of {part} channels, and heads are {width} wide in the product: "
            "that of one of their parts alone"
        ),
        asks=("attention_scale", float(f"{max(part, 1) ** -0.5:.6g}")),
    )


def joined(seen: Traced) -> list[tuple[Attention, int]]:
    """Return the heads of which it is not known what they come from, though the weights follow their scores."""
    return [
        (a, h)
        for a in followed(seen)
        for h, (scale, factor) in enumerate(zip(a.scale, a.factor, strict=True))
        if scale is None and bool(factor.isfinite()) and a.filled == a.query.shape[-1]
    ]


def parts_scaled_by(seen: Traced) -> Tensor:
    """Return for each of those heads the smaller width whose root its scores are divided by; 0 where there is none."""
    found = []
    for attention, head in joined(seen):
        factor, width = float(attention.factor[head]), attention.query.shape[-1]
        part = round(factor**-2) if factor > 0 else 0
        is_part = 1 < part < width and abs(part**-0.5 / factor - 1) < NEAR
        found.append(part if is_part else 0)
    return torch.tensor(found or [0])


def folded_scales(seen: Traced, module: nn.Module) -> Tensor:
    """Return, of each head whose scale is known, the constant by which the maps of its queries and keys are multiplied.

    A scale may be folded into a weight on the way (`linear(x, weight * scale)`): the map is a parameter times a number.
    """
    known = {n: p.detach().cpu().double() for n, p in module.named_parameters() if p.ndim == 2}
    found = []
    for attention in followed(seen):
        for scale, *sources in zip(attention.scale, attention.query_from, attention.key_from, strict=True):
            if scale is not None:
                found.append(math.prod(_folded(seen, s, known) for s in sources if s is not None))
    return torch.tensor(found, dtype=torch.float64)


def _folded(seen: Traced, head: Head, known: Mapping[str, Tensor]) -> float:
    """Return by what a head's columns of a map are a multiple of a parameter's; 1 where they are these, or of none."""
    product = next((p for p in reversed(seen.products) if 0 <= head.when - p.when <= 2), None)
    if product is None or product.right.ndim != 2 or head.channels[-1] >= product.right.shape[1]:
        return 1.0
    columns = list(head.channels)
    used = product.right[:, columns].detach().cpu().double()
    for parameter in known.values():
        for whole in (parameter, parameter.T):
            if whole.shape == product.right.shape and bool((own := whole[:, columns]).any()):
                factor = float((own * used).sum() / own.square().sum())
                if float((used - factor * own).abs().amax()) <= 1e-5 * float(used.abs().amax()):
                    return factor if abs(factor - 1) > NEAR else 1.0
    return 1.0

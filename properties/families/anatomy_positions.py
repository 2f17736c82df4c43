"""Positions inside a whole model: the numbers that are really added to scores, or by which queries are turned."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from veriformer.properties.anatomy.attention import Attention
from veriformer.properties.anatomy.entering import (
    embedding_factor,
    first_rows,
    position_steps,
    sinusoid_misfit,
)
from veriformer.properties.anatomy.flow import FAR, Flow, flow, is_far
from veriformer.properties.anatomy.rotations import (
    BASES,
    base_of,
    frequencies,
    goes_on_as_it_is,
    is_scaled,
    is_still,
    rotation_misfit,
    stands_still,
    traced_back,
    turning_misfit,
)
from veriformer.properties.anatomy.traced import Traced
from veriformer.properties.causes.sinusoids import wrong_tables
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.premises import needs_module
from veriformer.properties.engine.property import holds
from veriformer.properties.engine.violations import NotSpokenOfError
from veriformer.properties.families.anatomy_buckets import buckets_are_those_of_t5
from veriformer.properties.families.anatomy_distance import scores_go_by_distance
from veriformer.properties.families.anatomy_rows import far_rows_follow
from veriformer.properties.families.anatomy_slopes import over_themselves, slopes_are_those_of_alibi
from veriformer.properties.families.anatomy_turns import Angles, turn_cause
from veriformer.properties.subject.subject import Subject

KINDS = ("self_attention", "cross_attention", "layer", "encoder", "decoder", "encoder_decoder", "classifier")
_MEANT = "(declare positions='other' if that is meant)"
_ROUNDED = 2**-8  # the factor may be rounded to bfloat16


def _declares_what_enters(subject: Subject) -> str | None:
    if subject.fact("positions") in _JUDGED or subject.declares.get("embedding_scale") is not None:
        return None
    return f"speaks of positions = {', '.join(_JUDGED)}, and of embedding_scale; here nothing of it is declared"


@holds(
    "anatomy.positions",
    statement="Positions and embeddings act as declared: slopes, angles, tables, factors are those of closed forms.",
    formula="ALiBi: -m_h |t - s|; rotary: q_t = R(t base^(-2i/d)) W x_t; x_t = E + PE_t; embedding_scale: sqrt(d) E",
    source="Press et al. 2022; Su et al. 2021; Vaswani et al. 2017, sections 3.4 and 3.5.",
    kinds=KINDS,
    unless=(needs_module, _declares_what_enters),
    farthest=FAR,
    examples_factor=0.2,
    goes_wide=True,
)
def positions_are_the_declared_ones(case: Case) -> None:
    """Orders told apart and shifts that change nothing do not show which slopes or frequencies act: they are read off
    the scores, the turned queries and keys, or what enters the first layer; there a declared embedding_scale is, too.
    Once among many positions: a table that ends, or a distance that is cut, is nowhere in a short sequence.
    """
    flowing, before = flow(case), case.bench.tally.witnesses
    reasons = []
    for judge in (_embeddings, _JUDGED.get(case.subject.declares.get("positions"))):
        try:
            if judge is not None:
                judge(case, flowing)
        except NotSpokenOfError as problem:
            reasons.append(str(problem))
    if case.bench.tally.witnesses == before:
        case.does_not_apply("; ".join(reasons))


def _judges(case: Case, fact: str) -> Any:
    """Return a fact that is held against the subject here: one that is asked for counts as verified."""
    case.witness()
    return case.subject.fact(fact)


def _embeddings(case: Case, flowing: Flow) -> None:
    declared = case.subject.declares.get("embedding_scale")
    if declared is None or not case.subject.takes_tokens:
        case.does_not_apply("no embedding_scale is declared, or it is given embeddings")
    known = embedding_factor(flowing.seen)
    if known is None:
        case.does_not_apply("no rows of a table of tokens are seen to enter the first layer")
    factor = case.apply(factor_of_embeddings, flowing.seen)
    wanted, root = (flowing.width**0.5 if _judges(case, "embedding_scale") else 1.0), flowing.width**0.5
    off = (factor / wanted - 1).abs()
    # not multiplied by sqrt(d_model) they may be by another number, as muP has it
    is_right = off < _ROUNDED if declared else ((factor / root - 1).abs() >= _ROUNDED) | (off < _ROUNDED)
    case.require(
        is_right,
        f"the rows of {known[1] or 'the table of tokens'} enter the first layer with another factor than declared",
        got=f"{known[0]:.6g}",
        expected=f"{wanted:.6g}",
        error=off,
        tolerance=_ROUNDED,
        cause=lambda: f"token embeddings are multiplied by {known[0]:.5g}, sqrt(d_model) is {flowing.width**0.5:.5g}",
    )


def factor_of_embeddings(seen: Traced) -> Tensor:
    """Return by what the rows of the table of tokens are multiplied before the first layer; NaN if that is not seen."""
    found = embedding_factor(seen)
    return torch.tensor(torch.nan if found is None else found[0], dtype=torch.float64)


def _rotary(case: Case, flowing: Flow) -> None:
    known = _traced_back(flowing.seen, flowing.length, flowing.other)
    if not known:
        scores_go_by_distance(case, flowing)
        return
    angles = Angles.declared(case.subject)
    for number, attention in enumerate(known):
        own = _said(case, flowing, attention, angles).of_width(attention.query.shape[-1])
        error = case.apply(
            rotation_error, flowing.seen, flowing.length, flowing.other, number, own.base, own.width, own.layout
        )
        place = attention.place or "the model"
        if case.subject.declares.get("structure") == "other" and _is_left_out(attention, known, flowing.limit):
            continue
        is_off = not error < 1e3 * flowing.limit
        turns = frequencies(attention, own.width, own.layout) if is_off else None
        base = None if turns is None else base_of(turns)
        if turns is not None and base is None and is_scaled(turns, own.base):
            case.does_not_apply(f"the angles in {place} are slowed down by a scaling that is declared in no one way")
        _judges(case, "positions")
        case.require(
            error < 1e3 * flowing.limit,
            f"queries and keys in {place} are not turned by the declared angles",
            got=f"{float(error):.3g} of their size off",
            expected="the rotation by t base^(-2i/d)",
            error=error,
            tolerance=1e3 * flowing.limit,
            cause=lambda a=attention, o=own, p=place, b=base: turn_cause(a, o, p, b, flowing.limit, flowing.width),  # type: ignore[misc]
            asks=_asks_of(case.subject, attention, known, own, flowing.limit, base) if is_off else None,
        )
        values = case.apply(
            turned_values, flowing.seen, flowing.length, flowing.other, number, own.base, own.width, own.layout
        )
        case.require(
            values == 0,
            f"values in {place} are turned like queries and keys",
            got=f"{int(values)} of {attention.value.shape[1]} heads",
            expected="values as their projection gave them",
            cause=lambda p=place: f"the rotation is applied to the values in {p}, too",  # type: ignore[misc]
        )


_ROTATED = re.compile(r"_?(rotary|rot|rope|rotated)_?(n?dims?|size|channels|width|emb_dim)")


def _said(case: Case, flowing: Flow, attention: Attention, angles: Angles) -> Angles:
    """Return the angles with the channels that the model itself says it turns, where that is so and none are declared.

    A number that some part of it keeps by such a name is no question any more: `rotary_dim`, `rotary_ndims`, `rot_dim`.
    """
    if case.subject.fact("rotary_dim") is not None:
        return angles
    wide = attention.query.shape[-1]
    own = {v for m in flowing.module.modules() for n, v in vars(m).items() if type(v) is int and _ROTATED.fullmatch(n)}
    for width in sorted(v for v in own if 2 <= v < wide):
        if rotation_misfit(attention, angles.base, width, angles.layout) < 1e3 * flowing.limit:
            return replace(angles, width=width)
    return angles


def _traced_back(seen: Traced, length: int, other: int) -> list[Attention]:
    """Return the attentions over themselves whose queries and keys all have a known source."""
    found: list[Attention] = seen.once(
        ("traced back", length, other),
        lambda: [one for a in over_themselves(seen, length, other) if (one := traced_back(seen, a)) is not None],
    )
    return found


def rotation_error(seen: Traced, length: int, other: int, number: int, base: float, width: int, layout: str) -> Tensor:
    """Return how far queries and keys of an attention are from their projections turned by the closed form.

    Args:
        seen: the trace of a forward.
        length: of the sequence.
        other: of the other one.
        number: of the attention among those over themselves.
        base: of the frequencies.
        width: channels that are turned.
        layout: "halves", "interleaved" or "" for either.
    """
    return torch.tensor(rotation_misfit(_traced_back(seen, length, other)[number], base, width, layout))


def turned_values(seen: Traced, length: int, other: int, number: int, base: float, width: int, layout: str) -> Tensor:
    """Return how many heads of an attention give turned values on; arguments as of `rotation_error`."""
    attention = _traced_back(seen, length, other)[number]
    count = 0
    for head, source in enumerate(attention.value_from):
        if source is None or is_still(attention.value[:, head : head + 1], [source], seen.limit):
            continue
        rows = attention.value[:, head : head + 1]
        is_turned = turning_misfit(((rows, [source]),), base, width, layout) < 1e3 * seen.limit
        count += is_turned and goes_on_as_it_is(seen, attention, head)
    return torch.tensor(count)


def _is_left_out(attention: Attention, others: list[Attention], limit: float) -> bool:
    """Whether nothing is turned in one attention and something is in another: layers without positions, by design."""
    return stands_still(attention, limit) and not all(stands_still(a, limit) for a in others)


def _asks_of(
    subject: Subject, attention: Attention, others: list[Attention], own: Angles, limit: float, base: float | None
) -> tuple[str, Any] | None:
    """Return what to declare: another base, layers without positions, or that fewer channels are turned."""
    if base:
        return "base", float(f"{base:.4g}")
    if _is_left_out(attention, others, limit):
        return "structure", "other"
    for width in range(2, own.width, 2) if subject.fact("rotary_dim") is None else ():
        if rotation_misfit(attention, own.base, width, own.layout) < 1e3 * limit:
            return "rotary_dim", width
    return None


def _sinusoidal(case: Case, flowing: Flow) -> None:
    if not case.subject.takes_tokens or case.subject.fact("inputs") == "embeddings":
        case.does_not_apply("it is given embeddings: where positions enter is not seen")
    seen = flowing.repeated()
    sums = position_steps(seen, flowing.length, flowing.width)
    if not sums:
        case.does_not_apply("no sum was seen by which positions enter")
    entering = sums[-1]
    _judges(case, "positions")
    base, layout = float(case.subject.fact("base", 10000.0)), str(case.subject.fact("layout", ""))
    error = case.apply(table_error, seen, flowing.length, flowing.width, base, layout)
    case.require(
        error < 1e3 * flowing.limit,
        "what positions add to the embeddings is not the sinusoidal table",
        got=f"{float(error):.3g} off",
        expected="PE_t - PE_0 of the closed form",
        error=error,
        tolerance=1e3 * flowing.limit,
        cause=lambda: _table_words(entering, flowing.width, base, layout, flowing.limit),
        asks=_table_base(entering, flowing.width, base, layout, flowing.limit),
    )


def table_error(seen: Traced, length: int, width: int, base: float, layout: str) -> Tensor:
    """Return how far what positions add in all, at the last of the first sums, is from the closed form."""
    return torch.tensor(sinusoid_misfit(position_steps(seen, length, width)[-1], width, base, layout))


def _table_base(steps: Tensor, width: int, base: float, layout: str, limit: float) -> tuple[str, float] | None:
    """Return the base whose table fits best: far positions of small models tell large ones apart by little."""
    tried = dict.fromkeys((base**2, base**0.5, *_bases_told(steps, width), *BASES))
    off = {other: sinusoid_misfit(steps, width, other, layout) for other in tried}
    best = next(other for other in tried if off[other] <= max(10 * min(off.values()), 1e-9))
    return ("base", best) if off[best] < 1e3 * limit else None


def _bases_told(steps: Tensor, width: int) -> Iterator[float]:
    """Yield the bases that the second pair of channels tells, of either layout: its sine at position 1 is sin(w)."""
    if width < 4 or len(steps) < 2:
        return
    for first, second in ((0, 2), (0, 1)):
        share = float(steps[1, second] / steps[1, first]) * math.sin(1.0)
        if 0 < share < 1:
            base = math.asin(share) ** (-width / 2)
            yield float(round(base)) if abs(base - round(base)) < 1e-3 * base else base


def _table_words(steps: Tensor, width: int, base: float, layout: str, limit: float) -> str | None:
    if sinusoid_misfit(steps, width, math.exp(math.log10(base)), layout) < 1e3 * limit:
        return f"the frequencies are exp of the decimal logarithm of {base:g}: log10 stands in place of the natural one"
    if other := _table_base(steps, width, base, layout, limit):
        twice = " (its square: every exponent is twice what it should be)" if other[1] == base**2 else ""
        half = " (its root: every exponent is half of what it should be)" if other[1] == base**0.5 else ""
        return f"the table is that of base {other[1]:g}, not {base:g}{twice or half}"
    if layout and sinusoid_misfit(steps, width, base, "") < 1e3 * limit:
        return f"its channels are not laid out as declared ({layout})"
    for words, table in wrong_tables(len(steps), width, base):
        guess = table()
        if float((guess - guess[:1] - steps).abs().amax()) < 1e3 * limit:
            return f"the table is that of the formula with {words} {_MEANT}"
    right = next(
        (n for n in range(len(steps), 3, -1) if sinusoid_misfit(steps[:n], width, base, layout) < 1e3 * limit), 0
    )
    if right:
        anew = float((steps[right:] - steps[: len(steps) - right]).abs().amax()) < 1e3 * limit
        how = "begins anew" if anew else "is another one"
        return f"the table is right up to position {right - 1}, and {how} from position {right} on"
    return f"it is no known variant of the table {_MEANT}"


def _learned(case: Case, flowing: Flow) -> None:
    if case.subject.declares.get("position_offset") is None or not case.subject.takes_tokens:
        case.does_not_apply("no position_offset is declared, or it is given embeddings")
    seen = flowing.repeated()
    if is_far(case):
        far_rows_follow(case, flowing, seen)
        return
    known = first_rows(seen, flowing.module, flowing.length, flowing.width)
    if not known:
        case.does_not_apply("no sum was seen by which rows of a table of positions enter")
    first = case.apply(first_row, seen, flowing.module, flowing.length, flowing.width)
    _judges(case, "positions")
    wanted = int(case.subject.fact("position_offset"))
    case.require(
        first == wanted,
        f"the first position takes row {int(first)} of {known[0][1]}",
        got=f"row {int(first)}",
        expected=f"row {wanted}",
        cause=lambda: f"positions begin at row {int(first)} of {known[0][1]} instead of row {wanted}",
    )


def first_row(seen: Traced, module: nn.Module, length: int, width: int) -> Tensor:
    """Return the row of the table that stands at the first position; -1 where none does."""
    return torch.tensor(next((first for first, _ in first_rows(seen, module, length, width)), -1))


_JUDGED: Mapping[Any, Callable[[Case, Flow], None]] = {
    "t5": buckets_are_those_of_t5,
    "alibi": slopes_are_those_of_alibi,
    "rotary": _rotary,
    "sinusoidal": _sinusoidal,
    "learned": _learned,
}

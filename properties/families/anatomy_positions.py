"""Positions inside a whole model: the numbers that are really added to scores, or by which queries are turned."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from veriformer.properties.anatomy.attention import Attention, followed
from veriformer.properties.anatomy.entering import embedding_factor, first_rows, position_steps
from veriformer.properties.anatomy.flow import Flow, flow
from veriformer.properties.anatomy.sources import Head
from veriformer.properties.anatomy.traced import Traced
from veriformer.properties.definitions.angles import turned
from veriformer.properties.definitions.sinusoids import closed_form
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.premises import needs_module
from veriformer.properties.engine.property import holds
from veriformer.properties.engine.violations import NotSpokenOfError
from veriformer.properties.subject.subject import Subject
from veriformer.reference.position_bias import alibi_slopes

KINDS = ("layer", "encoder", "decoder", "encoder_decoder", "classifier")
_ROUNDED = 2**-8  # the factor may be rounded to bfloat16
_BASES = (1e2, 5e2, 1e3, 5e3, 1e4, 2e4, 1e5, 5e5, 1e6, 1e7)


def _declares_what_enters(subject: Subject) -> str | None:
    if subject.fact("positions") in _JUDGED or subject.declares.get("embedding_scale") is not None:
        return None
    return f"speaks of positions = {', '.join(_JUDGED)}, and of embedding_scale; here nothing of it is declared"


@holds(
    "anatomy.positions",
    statement="Positions act inside a model as declared: slopes, angles and tables are those of their closed forms.",
    formula="ALiBi: bias_h(t, s) = -m_h |t - s|; rotary: q_t = R(t base^(-2i/d)) W x_t; sinusoidal: x_t = E + PE_t",
    source="Press et al. 2022; Su et al. 2021; Vaswani et al. 2017, sections 3.4 and 3.5.",
    kinds=KINDS,
    unless=(needs_module, _declares_what_enters),
    examples_factor=0.2,
)
def positions_are_the_declared_ones(case: Case) -> None:
    """Orders told apart and shifts that change nothing do not show which slopes or frequencies act: they are read off
    the scores, the turned queries and keys, or what enters the first layer; there a declared embedding_scale is, too.
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
    wanted = flowing.width**0.5 if _judges(case, "embedding_scale") else 1.0
    off = (factor / wanted - 1).abs()
    case.require(
        off < _ROUNDED,
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


def _alibi(case: Case, flowing: Flow) -> None:
    known = _over_themselves(flowing.seen, flowing.length, flowing.other)
    if not known:
        case.does_not_apply("no attention of a sequence over itself could be followed from its scores to its weights")
    heads = flowing.built.config.num_heads
    _judges(case, "positions")
    for number, attention in enumerate(known):
        bias = case.apply(past_bias, flowing.seen, flowing.length, flowing.other, number)
        slopes = alibi_slopes(max(heads, len(bias)))
        first = number * len(bias) % len(slopes)  # heads may be computed one after another
        own = slopes[first : first + len(bias)]
        expected = case.apply(expected_bias, flowing.seen, flowing.length, flowing.other, number, own)
        place = attention.place or "the model"
        case.close(
            bias,
            expected,
            f"the bias in {place} is not that of ALiBi",
            bound=1e3 * flowing.limit,
            constants_allowed=True,
            cause=lambda bias=bias, expected=expected, place=place: _slope_cause(bias, expected, place),  # type: ignore[misc]
        )


def _over_themselves(seen: Traced, length: int, other: int) -> list[Attention]:
    return [a for a in followed(seen) if a.is_over(length, other)]


def past_bias(seen: Traced, length: int, other: int, number: int) -> Tensor:
    """Return `[H, T, T]`: what is added to the scores of keys at or before a query, of mean 0 in each row."""
    found = _over_themselves(seen, length, other)[number]
    return past(found.bias, ~found.hidden)


def expected_bias(seen: Traced, length: int, other: int, number: int, slopes: list[float]) -> Tensor:
    """Return `[H, T, T]`: the bias of ALiBi with these slopes, under the mask of an attention, as of `past_bias`."""
    visible = ~_over_themselves(seen, length, other)[number].hidden
    at = torch.arange(visible.shape[-1], dtype=torch.float64)
    return past(torch.tensor(slopes, dtype=torch.float64)[:, None, None] * (at[None, :] - at[:, None]), visible)


def past(bias: Tensor, visible: Tensor) -> Tensor:
    """Return a bias `[H, T, T]` at the visible keys at or before each query, of mean 0 in each row; 0 elsewhere."""
    kept = visible & torch.ones_like(visible).tril()
    middle = torch.where(kept, bias, 0.0).sum(-1, keepdim=True) / kept.sum(-1, keepdim=True).clamp(min=1)
    return torch.where(kept, bias - middle, 0.0)


def _slope_cause(bias: Tensor, expected: Tensor, place: str) -> str | None:
    """Say by how much the slopes differ, head by head."""
    square = expected.square().sum((1, 2)).clamp(min=1e-300)
    ratio = (bias * expected).sum((1, 2)) / square
    if not bool(bias.abs().amax() > 1e-6):
        return f"no bias is added to the scores in {place}"
    straight = float((bias - ratio[:, None, None] * expected).abs().amax()) < 1e-3
    if not straight:
        return f"the bias in {place} does not grow in proportion to the distance"
    told = ", ".join(f"{r:.4g}" for r in ratio.tolist())
    if bool((ratio + 1).abs().amax() < 1e-3):
        return f"the bias in {place} has the other sign: it favours distant keys"
    if bool((ratio - ratio[0]).abs().amax() < 1e-3):
        return f"every slope in {place} is {float(ratio[0]):.4g} times the published one"
    return f"the slopes in {place} are {told} times the published ones, head by head"


def _rotary(case: Case, flowing: Flow) -> None:
    known = _traced_back(flowing.seen, flowing.length, flowing.other)
    if not known:
        case.does_not_apply("no attention could be followed from its projections to its scores")
    _judges(case, "positions")
    angles = _Angles.declared(case.subject)
    for number, attention in enumerate(known):
        own = angles.of_width(attention.query.shape[-1])
        error = case.apply(
            rotation_error, flowing.seen, flowing.length, flowing.other, number, own.base, own.width, own.layout
        )
        place = attention.place or "the model"
        base = None if error < 1e3 * flowing.limit else _other_base(attention, own, flowing.limit)
        case.require(
            error < 1e3 * flowing.limit,
            f"queries and keys in {place} are not turned by the declared angles",
            got=f"{float(error):.3g} of their size off",
            expected="the rotation by t base^(-2i/d)",
            error=error,
            tolerance=1e3 * flowing.limit,
            cause=lambda a=attention, o=own, p=place, b=base: _turn_cause(a, o, p, b, flowing.limit),  # type: ignore[misc]
            asks=("base", base) if base else None,
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


@dataclass(frozen=True)
class _Angles:
    """Declared angles: the base, the channels that are turned, and the layout, "" for either."""

    base: float
    width: int
    layout: str

    @classmethod
    def declared(cls, subject: Subject) -> _Angles:
        base, layout = float(subject.fact("base", 10000.0)), str(subject.fact("layout", ""))
        return cls(base, int(subject.fact("rotary_dim", 0)), layout)

    def of_width(self, width: int) -> _Angles:
        return replace(self, width=self.width or width)


def _traced_back(seen: Traced, length: int, other: int) -> list[Attention]:
    """Return the attentions over themselves whose queries and keys all have a known source."""
    found = _over_themselves(seen, length, other)
    return [a for a in found if all(x is not None for x in (*a.query_from, *a.key_from))]


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
    return torch.tensor(_best(_traced_back(seen, length, other)[number], base, width, layout))


def turned_values(seen: Traced, length: int, other: int, number: int, base: float, width: int, layout: str) -> Tensor:
    """Return how many heads of an attention have values that are turned; arguments as of `rotation_error`."""
    attention = _traced_back(seen, length, other)[number]
    count = 0
    for head, source in enumerate(attention.value_from):
        if source is None or _is_still(attention.value[:, head : head + 1], [source], seen.limit):
            continue
        rows = attention.value[:, head : head + 1]
        count += _nearest(((rows, [source]),), base, width, layout) < 1e3 * seen.limit
    return torch.tensor(count)


def _best(attention: Attention, base: float, width: int, layout: str) -> float:
    """Return the relative error of the layout, sense and first position that explain queries and keys best."""
    both = ((attention.query, attention.query_from), (attention.key, attention.key_from))
    return _nearest(both, base, width, layout)


_Sides = tuple[tuple[Tensor, list[Head | None]], ...]


def _nearest(sides: _Sides, base: float, width: int, layout: str) -> float:
    # a first position of 1 or 2 gives the same scores as one of 0
    forms = product([layout] if layout else ["halves", "interleaved"], (1.0, -1.0), (0, 1, 2))
    return min(max(_errors(sides, base, width, *form)) for form in forms)


def _errors(sides: _Sides, base: float, width: int, layout: str, sign: float, start: int) -> Iterator[float]:
    for rows, sources in sides:
        at = torch.arange(rows.shape[2], dtype=torch.float64) + start
        angles = at[:, None] * base ** (-torch.arange(0, width - 1, 2, dtype=torch.float64) / width)
        for head, source in enumerate(sources):
            if source is not None:
                wanted = turned(source.source * source.factor, angles, layout, sign)
                yield float((rows[:, head] - wanted).abs().amax() / rows[:, head].abs().amax())


def _other_base(attention: Attention, own: _Angles, limit: float) -> float | None:
    """Return another base that explains the rotation."""
    return next((b for b in _BASES if _best(attention, b, own.width, own.layout) < 1e3 * limit), None)


def _turn_cause(attention: Attention, own: _Angles, place: str, base: float | None, limit: float) -> str | None:
    """Say what is done to queries and keys instead."""
    if base:
        return f"the angles in {place} are those of base {base:g}"
    still = [_is_still(rows, sources, limit) for rows, sources in (
        (attention.query, attention.query_from), (attention.key, attention.key_from))]  # fmt: skip
    if all(still):
        return f"neither queries nor keys are turned in {place}"
    if any(still):
        which, other = ("keys", "queries") if still[0] else ("queries", "keys")
        return f"in {place} {which} are turned and {other} are not"
    wide = attention.query.shape[-1]
    for part in (wide // 2, wide // 4, wide):
        if part >= 2 and part != own.width and _best(attention, own.base, part, "") < 1e3 * limit:
            return f"{part} of {wide} channels are turned in {place}"
    if own.layout and _best(attention, own.base, own.width, "") < 1e3 * limit:
        return f"the channels of a pair in {place} do not stand as declared (layout={own.layout!r})"
    return None


def _is_still(rows: Tensor, sources: list[Head | None], limit: float) -> bool:
    pairs = [(rows[:, h], s.source * s.factor) for h, s in enumerate(sources) if s is not None]
    return bool(pairs) and all(float((a - b).abs().amax()) <= 1e2 * limit * float(b.abs().amax()) for a, b in pairs)


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
        asks=_table_base(entering, flowing.width, layout, flowing.limit),
    )


def table_error(seen: Traced, length: int, width: int, base: float, layout: str) -> Tensor:
    """Return how far what positions add in all, at the last of the first sums, is from the closed form."""
    return torch.tensor(_table_error(position_steps(seen, length, width)[-1], width, base, layout))


def _table_error(steps: Tensor, width: int, base: float, layout: str) -> float:
    errors = []
    for arrangement, first in product([layout] if layout else ["interleaved", "halves"], (0, 1, 2)):
        angles = torch.arange(first, len(steps) + first, dtype=torch.float64)[:, None]
        to_the_end = base ** (
            -torch.arange(width // 2, dtype=torch.float64) / max(width // 2 - 1, 1)
        )  # tensor2tensor's
        spread = angles * to_the_end
        both = (spread.sin(), spread.cos())
        other = torch.cat(both, -1) if arrangement == "halves" else torch.stack(both, -1).flatten(1)
        for table in (closed_form(len(steps), width, base, arrangement, first), other):
            if table.shape != steps.shape:
                continue
            wanted = table - table[:1]
            scale = float((wanted * steps).sum() / wanted.square().sum())  # it may be weighed against the embeddings
            errors.append(float((steps - (scale or 1.0) * wanted).abs().amax()))
    return min(errors)


def _table_base(steps: Tensor, width: int, layout: str, limit: float) -> tuple[str, float] | None:
    return next((("base", b) for b in _BASES if _table_error(steps, width, b, layout) < 1e3 * limit), None)


def _table_words(steps: Tensor, width: int, base: float, layout: str, limit: float) -> str | None:
    if other := _table_base(steps, width, layout, limit):
        return f"the table is that of base {other[1]:g}, not {base:g}"
    if layout and _table_error(steps, width, base, "") < 1e3 * limit:
        return f"its channels are not laid out as declared ({layout})"
    return None


def _learned(case: Case, flowing: Flow) -> None:
    if case.subject.declares.get("position_offset") is None or not case.subject.takes_tokens:
        case.does_not_apply("no position_offset is declared, or it is given embeddings")
    seen = flowing.repeated()
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
    "alibi": _alibi,
    "rotary": _rotary,
    "sinusoidal": _sinusoidal,
    "learned": _learned,
}

"""Positions inside a whole model: the numbers that are really added to scores, or by which queries are turned."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from veriformer.properties.anatomy.attention import Attention, Head
from veriformer.properties.anatomy.flow import Flow, attended, flow
from veriformer.properties.anatomy.traced import traced
from veriformer.properties.causes.structure import off_the_record
from veriformer.properties.definitions.angles import turned
from veriformer.properties.definitions.sinusoids import closed_form
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.premises import needs_fact, needs_module
from veriformer.properties.engine.property import holds
from veriformer.properties.subject.subject import Subject
from veriformer.reference.position_bias import alibi_slopes

KINDS = ("layer", "encoder", "decoder", "encoder_decoder", "classifier")
_BASES = (1e2, 5e2, 1e3, 5e3, 1e4, 2e4, 1e5, 5e5, 1e6, 1e7)


@holds(
    "anatomy.positions",
    statement="Positions act inside a model as declared: slopes, angles and tables are those of their closed forms.",
    formula="ALiBi: bias_h(t, s) = -m_h |t - s|; rotary: q_t = R(t base^(-2i/d)) W x_t; sinusoidal: x_t = E + PE_t",
    source="Press et al. 2022; Su et al. 2021; Vaswani et al. 2017, section 3.5.",
    kinds=KINDS,
    unless=(needs_module, needs_fact("positions", "alibi", "rotary", "sinusoidal")),
    examples_factor=0.2,
)
def positions_are_the_declared_ones(case: Case) -> None:
    """Orders told apart and shifts that change nothing do not show which slopes or frequencies act: they are read off
    the scores, the turned queries and keys, or what enters the first layer.
    """
    kind = case.subject.fact("positions")
    {"alibi": _alibi, "rotary": _rotary, "sinusoidal": _sinusoidal}[str(kind)](case, flow(case))


def _over_itself(attention: Attention, seen: Flow) -> bool:
    lengths = attention.hidden.shape[1:]
    return lengths[0] == lengths[1] and lengths[0] in (seen.length, seen.other)


def _alibi(case: Case, seen: Flow) -> None:
    with off_the_record(case):
        known = [a for a in attended(seen.module, seen.run, seen.limit) if _over_itself(a, seen)]
    if not known:
        case.does_not_apply("no attention of a sequence over itself could be followed from its scores to its weights")
    heads = seen.built.config.num_heads
    for number, attention in enumerate(known):
        bias = case.apply(past_bias, seen.module, seen.run, seen.limit, attention.when)
        slopes = torch.tensor(alibi_slopes(max(heads, len(bias))), dtype=torch.float64)
        first = number * len(bias) % len(slopes)  # heads may be computed one after another
        expected = past(_alibi_table(slopes[first : first + len(bias)], bias.shape[-1]), ~attention.hidden)
        place = attention.place or "the model"
        case.close(
            bias,
            expected,
            f"the bias in {place} is not that of ALiBi",
            bound=1e3 * seen.limit,
            constants_allowed=True,
            cause=lambda bias=bias, expected=expected, place=place: _slope_cause(bias, expected, place),  # type: ignore[misc]
        )
    case.witness()


def past_bias(module: nn.Module, run: Callable[[], Any], limit: float, when: int) -> Tensor:
    """Return `[H, T, T]`: what is added to the scores of keys at or before a query, of mean 0 in each row."""
    found = next(a for a in attended(module, run, limit) if a.when == when)
    return past(found.bias, ~found.hidden)


def past(bias: Tensor, visible: Tensor) -> Tensor:
    """Return a bias `[H, T, T]` at the visible keys at or before each query, of mean 0 in each row; 0 elsewhere."""
    kept = visible & torch.ones_like(visible).tril()
    middle = torch.where(kept, bias, 0.0).sum(-1, keepdim=True) / kept.sum(-1, keepdim=True).clamp(min=1)
    return torch.where(kept, bias - middle, 0.0)


def _alibi_table(slopes: Tensor, length: int) -> Tensor:
    at = torch.arange(length, dtype=torch.float64)
    return slopes[:, None, None] * (at[None, :] - at[:, None])


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


def _rotary(case: Case, seen: Flow) -> None:
    with off_the_record(case):
        known = [a for a in attended(seen.module, seen.run, seen.limit) if _over_itself(a, seen)]
        known = [a for a in known if all(x is not None for x in (*a.query_from, *a.key_from))]
    if not known:
        case.does_not_apply("no attention could be followed from its projections to its scores")
    for attention in known:
        error = case.apply(
            rotation_error, seen.module, seen.run, seen.limit, attention.when, *_declared(case.subject, attention)
        )
        place = attention.place or "the model"
        with off_the_record(case):
            base = _other_base(case.subject, attention, seen.limit)
        case.require(
            error < 1e3 * seen.limit,
            f"queries and keys in {place} are not turned by the declared angles",
            got=f"{float(error):.3g} of their size off",
            expected="the rotation by t base^(-2i/d)",
            error=error,
            tolerance=1e3 * seen.limit,
            cause=lambda a=attention, p=place, b=base: _turn_cause(case.subject, a, p, b, seen.limit),  # type: ignore[misc]
            asks=("base", base) if base else None,
        )
    case.witness()


def _declared(subject: Subject, attention: Attention) -> tuple[float, int, str, int]:
    width = attention.query.shape[-1]
    return (
        float(subject.fact("base", 10000.0)), int(subject.fact("rotary_dim", width)), str(subject.fact("layout", "")),
        int(subject.fact("position_offset", 0)),
    )  # fmt: skip


def rotation_error(
    module: nn.Module, run: Callable[[], Any], limit: float, when: int, base: float, width: int, layout: str, first: int
) -> Tensor:
    """Return how far the queries and keys of an attention are from their projections turned by the closed form.

    Args:
        module: the model.
        run: calls it.
        limit: largest relative difference that is rounding.
        when: number of the attention's output among the values.
        base: of the frequencies.
        width: channels that are turned.
        layout: "halves", "interleaved" or "" for either.
        first: position of the first token.
    """
    found = next(a for a in attended(module, run, limit) if a.when == when)
    return torch.tensor(_best(found, base, width, layout, first))


def _best(attention: Attention, base: float, width: int, layout: str, first: int) -> float:
    """Return the relative error of the layout, sense and first position that explain queries and keys best."""
    forms = product([layout] if layout else ["halves", "interleaved"], (1.0, -1.0), {0, 1, 2, first})
    return min(max(_errors(attention, base, width, *form)) for form in forms)


def _errors(attention: Attention, base: float, width: int, layout: str, sign: float, start: int) -> Iterator[float]:
    for rows, sources in ((attention.query, attention.query_from), (attention.key, attention.key_from)):
        at = torch.arange(rows.shape[2], dtype=torch.float64) + start
        angles = at[:, None] * base ** (-torch.arange(0, width - 1, 2, dtype=torch.float64) / width)
        for head, source in enumerate(sources):
            if source is not None:
                wanted = turned(source.source * source.factor, angles, layout, sign)
                yield float((rows[:, head] - wanted).abs().amax() / rows[:, head].abs().amax())


def _other_base(subject: Subject, attention: Attention, limit: float) -> float | None:
    """Return another base that explains the rotation."""
    _, width, layout, first = _declared(subject, attention)
    return next((b for b in _BASES if _best(attention, b, width, layout, first) < 1e3 * limit), None)


def _turn_cause(subject: Subject, attention: Attention, place: str, base: float | None, limit: float) -> str | None:
    """Say what is done to queries and keys instead."""
    if base:
        return f"the angles in {place} are those of base {base:g}"
    still = [_is_still(rows, sources, limit) for rows, sources in (
        (attention.query, attention.query_from), (attention.key, attention.key_from))]  # fmt: skip
    if all(still):
        return f"neither queries nor keys are turned in {place}"
    if any(still):
        return (
            f"in {place} {'keys' if still[0] else 'queries'} are turned and {'queries' if still[0] else 'keys'} are not"
        )
    wide, width = attention.query.shape[-1], _declared(subject, attention)[1]
    for part in (wide // 2, wide // 4, wide):
        if (
            part >= 2
            and part != width
            and _best(attention, float(subject.fact("base", 10000.0)), part, "", 0) < 1e3 * limit
        ):
            return f"{part} of {wide} channels are turned in {place}"
    return None


def _is_still(rows: Tensor, sources: list[Head | None], limit: float) -> bool:
    pairs = [(rows[:, h], s.source * s.factor) for h, s in enumerate(sources) if s is not None]
    return bool(pairs) and all(float((a - b).abs().amax()) <= 1e2 * limit * float(b.abs().amax()) for a, b in pairs)


def _sinusoidal(case: Case, seen: Flow) -> None:
    if not case.subject.takes_tokens or case.subject.fact("inputs") == "embeddings":
        case.does_not_apply("it is given embeddings: where positions enter is not seen")
    run = case.caller(seen.built, *_repeated(case, seen))
    base, layout = float(case.subject.fact("base", 10000.0)), str(case.subject.fact("layout", ""))
    width = seen.built.config.d_model
    with off_the_record(case):
        entering = _position_steps(seen.module, run, seen.length, width)
    if not entering:
        case.does_not_apply("no sum was seen by which positions enter")
    error = case.apply(table_error, seen.module, run, seen.length, width, base, layout)
    case.witness()
    case.require(
        error < 1e3 * seen.limit,
        "what positions add to the embeddings is not the sinusoidal table",
        got=f"{float(error):.3g} off",
        expected="PE_t - PE_0 of the closed form",
        error=error,
        tolerance=1e3 * seen.limit,
        cause=lambda: _table_words(entering, width, base, layout, seen.limit),
        asks=_table_base(entering, width, layout, seen.limit),
    )


def _repeated(case: Case, seen: Flow) -> tuple[Tensor, ...]:
    """Return inputs in which every position of a sample holds the same token."""
    tokens = seen.tokens[:, :1].expand(-1, seen.length).contiguous()
    if not seen.other:
        return (tokens,)
    return (tokens[:, :1].expand(-1, seen.other).contiguous(), tokens)


def _position_steps(module: nn.Module, run: Callable[[], Any], length: int, width: int) -> list[Tensor]:
    """Return `[T, D]` of the first sums that differ by the position alone, less those of the first position."""
    found: list[Tensor] = []
    trace = traced(module, run)
    first = min((p.when for p in trace.products), default=len(trace.values))
    for value in trace.values[:first]:
        x = value.output.double()
        if value.name != "add" or x.ndim != 3 or x.shape[-1] != width or length not in x.shape[:2]:
            continue
        x = x if x.shape[1] == length else x.transpose(0, 1)
        steps = x - x[:, :1]
        if float((steps - steps[:1]).abs().amax()) <= 1e-4 * float(x.abs().amax()) and bool(steps.abs().amax() > 1e-6):
            found.append(steps[0])
    return found


def table_error(module: nn.Module, run: Callable[[], Any], length: int, width: int, base: float, layout: str) -> Tensor:
    """Return how far what positions add is from the closed form, at the sum that is nearest to it."""
    found = _position_steps(module, run, length, width)
    return torch.tensor(min(_table_error(steps, width, base, layout) for steps in found))


def _table_error(steps: Tensor, width: int, base: float, layout: str, start: int = 0) -> float:
    errors = []
    for arrangement, first in product([layout] if layout else ["interleaved", "halves"], {0, 1, 2, start}):
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


def _table_base(entering: list[Tensor], width: int, layout: str, limit: float) -> tuple[str, float] | None:
    for base in _BASES:
        if min(_table_error(steps, width, base, layout) for steps in entering) < 1e3 * limit:
            return "base", base
    return None


def _table_words(entering: list[Tensor], width: int, base: float, layout: str, limit: float) -> str | None:
    if other := _table_base(entering, width, layout, limit):
        return f"the table is that of base {other[1]:g}, not {base:g}"
    if layout and min(_table_error(steps, width, base, "") for steps in entering) < 1e3 * limit:
        return f"its channels are not laid out as declared ({layout})"
    return None

"""The attentions inside a whole model, each judged by what really flows through it: scale, softmax, mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from veriformer.properties.anatomy.attention import Attention, Head
from veriformer.properties.anatomy.flow import Flow, attended, flow
from veriformer.properties.causes.influence_maps import causal_region
from veriformer.properties.causes.structure import off_the_record
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.premises import excludes_fact, needs_module
from veriformer.properties.engine.property import holds
from veriformer.properties.subject.facts import SCALES, attention_scale
from veriformer.properties.subject.subject import Subject

KINDS = ("layer", "encoder", "decoder", "encoder_decoder", "classifier")
_PAPER = "Vaswani et al. 2017, section 3.2."
_NEAR = 1e-3
"""A scale further off, relatively, is another one: float32 constants and a fit in float32 err by 1e-4 at most."""


@holds(
    "anatomy.scale",
    statement="In every attention inside a model every head multiplies q k^T by the declared scale (1/sqrt(d_head)).",
    formula="log A_h = s q_h k_h^T + bias + a constant a row, with q_h and k_h as they leave their projections",
    source=_PAPER,
    kinds=KINDS,
    unless=(needs_module, excludes_fact("query_key_norm"), excludes_fact("soft_cap"), excludes_fact("quantised")),
    examples_factor=0.2,
    catches=("SC02", "SC04"),
)
def every_head_has_the_scale(case: Case) -> None:
    """The scale is fitted to the weights that really flow, whatever the order of projecting, scaling, biasing and
    masking, and goes back to what the projections gave: scaling queries before or keys after counts as well.
    """
    seen = flow(case)
    with off_the_record(case):
        known = [a for a in attended(seen.module, seen.run, seen.limit) if any(s is not None for s in a.scale)]
    if not known:
        case.does_not_apply("no attention could be followed from its projections to its weights")
    found = case.apply(scales, seen.module, seen.run, seen.limit)
    names = [
        (a.place, h, len(a.scale), a.query.shape[-1]) for a in known for h, s in enumerate(a.scale) if s is not None
    ]
    declared = case.subject.fact("attention_scale")
    width = seen.built.config.d_model
    wanted = torch.tensor([attention_scale(declared, k, width) for *_, k in names], dtype=torch.float64)
    off = (found / wanted - 1).abs()
    case.witness()
    worst = int(off.argmax())
    place, head, heads, d_head = names[worst]
    seen_scale, right = float(found[worst]), float(wanted[worst])
    lone = [n for n, o in zip(names, off.tolist(), strict=True) if o > _NEAR]
    case.require(
        off.amax() < _NEAR,
        f"in {place or 'the model'} head {head} of {heads} multiplies q k^T by {seen_scale:.6g}, not by {right:.6g}",
        got=f"{seen_scale:.6g}",
        expected=f"{right:.6g}",
        error=off.amax(),
        tolerance=_NEAR,
        cause=lambda: _scale_cause(lone, names, seen_scale, right, d_head, width),
        asks=("attention_scale", _named(seen_scale, d_head, width)) if len(lone) == len(names) else None,
    )


def scales(module: nn.Module, run: Callable[[], Any], limit: float) -> Tensor:
    """Return the scale of every head of every attention that can be followed, in order, float64."""
    found = [s for a in attended(module, run, limit) for s in a.scale if s is not None]
    return torch.tensor(found, dtype=torch.float64)


def _named(scale: float, d_head: int, d_model: int) -> str | float:
    """Return the name of a scale, or the number."""
    for name, formula in SCALES.items():
        if abs(formula(d_head, d_model) / scale - 1) < _NEAR:
            return name
    return float(f"{scale:.6g}")


def _scale_cause(
    lone: list[tuple[str, int, int, int]], names: list[tuple[str, int, int, int]], seen: float, right: float,
    d_head: int, d_model: int,
) -> str:  # fmt: skip
    """Say what the scale is, and whose."""
    ratio = seen / right
    words = {
        1.0: "1: the scores are not scaled at all",
        1 / d_head: "1/d_head: the scores are scaled twice",
        d_model**-0.5: "1/sqrt(d_model) in place of 1/sqrt(d_head)",
        d_head**0.5: "sqrt(d_head): multiplied where it should be divided",
    }
    what = next((w for value, w in words.items() if abs(seen / value - 1) < _NEAR), f"{ratio:.4g} times the right one")
    if len(lone) == len(names):
        return f"the measured scale of every head is {what}"
    places = sorted({place for place, *_ in lone})
    whose = (
        f"of head {lone[0][1]} in {lone[0][0]}" if len(lone) == 1 else f"of {len(lone)} heads, in {', '.join(places)}"
    )
    return f"the measured scale {whose} alone is {what}"


@holds(
    "anatomy.softmax",
    statement="In every attention of a model weights are normalised over the keys, and weigh the values of these keys.",
    formula="A_h = softmax over s; output_h = A_h v_g with the values of the group whose keys gave A_h",
    source=_PAPER,
    kinds=KINDS,
    unless=(needs_module, excludes_fact("quantised")),
    examples_factor=0.2,
)
def weights_are_normalised_over_keys(case: Case) -> None:
    """A softmax over queries gives outputs of the right shape. Grouped heads share keys and values: a head that takes
    the keys of one group and the values of another mixes two heads.
    """
    seen = flow(case)
    with off_the_record(case):
        known = attended(seen.module, seen.run, seen.limit)
    if not known:
        case.does_not_apply("no attention could be followed from its scores to its weights")
    sums = case.apply(row_sums, seen.module, seen.run, seen.limit)
    worst = int((sums - 1).abs().argmax())
    place = known[worst].place or "the model"
    case.witness()
    if not case.subject.fact("sink"):
        case.require(
            (sums - 1).abs().amax() < 100 * seen.limit,
            f"in {place} rows of attention weights do not sum to 1",
            got=f"{float(sums[worst]):.6g}",
            expected="1",
            error=(sums - 1).abs().amax(),
            tolerance=100 * seen.limit,
            cause=lambda: f"a part of {1 - float(sums[worst]):.3g} of the softmax in {place} goes to no key",
            asks=("sink", True),
        )
    crossed = case.apply(crossed_groups, seen.module, seen.run, seen.limit)
    which = next((a.place for a in known if _crosses(a)), "")
    case.require(
        crossed == 0,
        f"in {which or 'the model'} heads weigh the values of other heads' keys",
        got=f"{int(crossed)} heads",
        expected="none",
        cause=lambda: f"keys and values are dealt to the heads in two different orders in {which}",
    )


def row_sums(module: nn.Module, run: Callable[[], Any], limit: float) -> Tensor:
    """Return, of each attention, the sum of weights that is furthest from 1, float64."""
    sums = [a.weights.sum(-1).flatten() for a in attended(module, run, limit)]
    return torch.stack([s[(s - 1).abs().argmax()] for s in sums])


def crossed_groups(module: nn.Module, run: Callable[[], Any], limit: float) -> Tensor:
    """Return how many attentions give heads the keys of one group and the values of another."""
    return torch.tensor(sum(_crosses(a) for a in attended(module, run, limit)))


def _crosses(attention: Attention) -> bool:
    """Whether the groups of keys and those of values, in the order of their channels, belong to other heads."""
    keys, values = _ranks(attention.key_from), _ranks(attention.value_from)
    return keys is not None and values is not None and max(keys) == max(values) and keys != values


def _ranks(sources: list[Head | None]) -> list[int] | None:
    """Return for each head the number of its part among the parts; None where some is not known."""
    starts = [(s.when, s.start) for s in sources if s is not None]
    if len(starts) < len(sources) or len({when for when, _ in starts}) > 1:
        return None
    order = sorted(set(starts))
    return [order.index(s) for s in starts]


def _hides_by_design(subject: Subject) -> str | None:
    if subject.fact("sparse"):
        return "which keys are hidden by design is not declared: it is declared to be sparse"
    if subject.fact("causal") is None:
        return "the fact 'causal' is neither declared nor known"
    return None


@holds(
    "anatomy.mask",
    statement="Every head of every layer hides the keys that the declared mask hides, and no other.",
    formula="A_h(t, s) = 0  <=>  s > t, or s <= t - w with a window of w",
    source="Vaswani et al. 2017, section 3.2.3; Beltagy et al. 2020, section 3.1.",
    kinds=KINDS,
    unless=(needs_module, _hides_by_design, excludes_fact("quantised")),
    examples_factor=0.2,
)
def every_head_has_the_mask(case: Case) -> None:
    """Through a stack a layer that hides too much is made up for by the others, and a window that is one too wide is
    lost in their reach: so the weights of each are looked at. Without a mask argument nothing is padding.
    """
    seen = flow(case)
    with off_the_record(case):
        known = [a for a in attended(seen.module, seen.run, seen.limit) if _wanted(case.subject, seen, a) is not None]
    if not known:
        case.does_not_apply("no attention over its sequences could be followed")
    wanted = [_wanted(case.subject, seen, a) for a in known]
    for attention, allowed in zip(known, wanted, strict=True):
        assert allowed is not None
        hidden = case.apply(hidden_keys, seen.module, seen.run, seen.limit, attention.when)
        wrong = hidden != ~allowed
        case.witness()
        head, t, s = (int(i) for i in wrong.nonzero()[0]) if bool(wrong.any()) else (0, 0, 0)
        sees = "does not see" if bool(hidden[head, t, s]) else "sees"
        place = attention.place or "the model"
        case.require(
            ~wrong.any(),
            f"in {place} head {head} of {len(hidden)}: query {t} {sees} key {s}",
            got=f"{int((hidden[head] & allowed).sum())} too many hidden, {int((~hidden[head] & ~allowed).sum())} seen",
            expected="those of the declared mask",
            cause=lambda hidden=hidden, allowed=allowed, place=place: _mask_cause(hidden, allowed, place),  # type: ignore[misc]
            asks=("sparse", True) if bool((hidden | allowed).all()) else None,
        )


def hidden_keys(module: nn.Module, run: Callable[[], Any], limit: float, when: int) -> Tensor:
    """Return `[H, T, S]`: which keys no sample's query sees in the attention whose output is value number `when`."""
    return next(a.hidden for a in attended(module, run, limit) if a.when == when)


def _wanted(subject: Subject, seen: Flow, attention: Attention) -> Tensor | None:
    """Return `[T, S]`: what may be seen in an attention; None where it is over something else than the sequences."""
    _, queries, keys = attention.hidden.shape
    if (queries, keys) == (seen.length, seen.length):
        if not subject.fact("causal"):  # what a two-sided window hides is declared in no one way
            return None if subject.fact("window") else torch.ones(queries, keys, dtype=torch.bool)
        return causal_region(
            seen.length, subject.fact("window"), subject.fact("prefix"), subject.fact("sink_tokens", 0)
        )
    if seen.other and queries in (seen.length, seen.other) and keys == seen.other:
        return torch.ones(queries, keys, dtype=torch.bool)
    return None


def _mask_cause(hidden: Tensor, allowed: Tensor, place: str) -> str | None:
    """Say how the mask of an attention differs, where all its heads do so alike."""
    if not bool((hidden == hidden[:1]).all()):
        odd = [h for h in range(len(hidden)) if bool((hidden[h] == ~allowed).all())]
        wrong = [str(h) for h in range(len(hidden)) if h not in odd]
        return f"the mask of head {', '.join(wrong)} in {place} is another one than that of the others"
    own, length = hidden[0], hidden.shape[-1]
    if own.shape[0] == own.shape[1]:
        for shift in (-2, -1, 1, 2):
            if torch.equal(own, torch.ones_like(own).triu(1 + shift)):
                way = "later" if shift > 0 else "earlier"
                return f"the causal mask in {place} begins {abs(shift)} {way} than behind the query itself"
        if not bool(own.any()):
            return f"no mask hides anything in {place}"
        for window in range(1, length):
            if torch.equal(own, ~causal_region(length, window)):
                return f"in {place} queries see the last {window} keys alone, themselves among them"
    return None

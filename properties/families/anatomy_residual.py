"""Residual sums inside a whole model, each judged by the numbers that flow through it."""

from __future__ import annotations

import torch
from torch import Tensor

from veriformer.properties.anatomy.flow import Flow, flow
from veriformer.properties.anatomy.residual import Sum, residual_sums
from veriformer.properties.anatomy.sublayers import older_streams, past_their_norm, sublayers, without_stream
from veriformer.properties.anatomy.traced import Traced
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.premises import excludes_fact, needs_module
from veriformer.properties.engine.property import holds
from veriformer.properties.families.anatomy_parts import KINDS, other_places
from veriformer.properties.families.anatomy_repeats import nothing_is_added_once_more

_NEAR = 1e-3
"""A factor further off is another one: those of float32 are fitted to 1e-4."""


@holds(
    "anatomy.residual",
    statement="Every sum of a model's residual stream takes the stream once and what the sublayer gave once.",
    formula="x <- x + F(x): both with factor 1, in every sublayer of every layer",
    source="He et al. 2016, equation 1.",
    kinds=KINDS,
    unless=(
        needs_module,
        excludes_fact("residual", False),
        excludes_fact("quantised"),
    ),
    examples_factor=0.2,
)
def sums_take_both_once(case: Case) -> None:
    """A stream that is added twice, a branch that is halved, trains all the same. Models that weigh them by design
    (DeepNorm, macaron, ReZero) say structure="other": of those the signs are judged alone.
    """
    flowing = flow(case)
    known = residual_sums(flowing.seen, flowing.width)
    if not known:
        case.does_not_apply("no sum of a stream and what a linear map gave was recognised")
    if case.subject.fact("structure") == "other":
        _all_are_added(case, flowing, known)
        return
    off = case.apply(sum_factors, flowing.seen, flowing.width)
    odd = max(known, key=_off)
    lone = [s for s in known if _off(s) > _NEAR]
    case.witness()
    case.require(
        (off - 1).abs().amax() < _NEAR,
        f"what {odd.place or 'a linear map'} gives is not added to the stream as it is",
        got=f"{odd.stream:.5g} times the stream + {odd.branch:.5g} times what it gives",
        expected="1 and 1",
        error=(off - 1).abs().amax(),
        tolerance=_NEAR,
        cause=lambda: _sum_words(odd, len(lone), len(known)),
        asks=("structure", "other"),
    )
    _every_layer_adds(case, flowing)
    _one_place_of_norms(case, flowing)
    _none_goes_past_a_norm(case, flowing)
    _none_takes_an_older_stream(case, flowing)
    nothing_is_added_once_more(case, flowing)


def _all_are_added(case: Case, flowing: Flow, known: list[Sum]) -> None:
    """Require that nothing is subtracted as it is where other sublayers are added: no weighing does that."""
    odd = [s for s in known if abs(s.branch * s.stream + 1) < _NEAR]
    count = case.apply(subtracted, flowing.seen, flowing.width)
    case.witness()
    case.require(
        (count == 0) | (count == len(known)),
        f"what {odd[0].place or 'a linear map'} gives is subtracted from the stream"
        if odd
        else "a sum is a difference",
        got=f"{len(odd)} of {len(known)} sums",
        expected="sums",
        cause=lambda: _sum_words(odd[0], len(odd), len(known)),
    )


def subtracted(seen: Traced, width: int) -> Tensor:
    """Return how many sums take what the sublayer gave with the other sign than the stream, both as they are."""
    return torch.tensor(sum(abs(s.branch * s.stream + 1) < _NEAR for s in residual_sums(seen, width)))


def _none_goes_past_a_norm(case: Case, flowing: Flow) -> None:
    """Require that no sublayer takes the stream as it is where a norm takes it, too, for others."""
    past = past_their_norm(flowing.seen)
    count = case.apply(raw_sublayers, flowing.seen)
    place, norm = past[0] if past else ("", "")
    case.require(
        count == 0,
        f"what {place or 'a linear map'} gives is made of what {norm} takes, not of what it gives",
        got=f"the stream as it is behind {', '.join(one or 'the model' for one, _ in past)}",
        expected="the normalised stream, as others of the layer take it",
        cause=lambda: f"{place or 'a sublayer'} is handed the stream itself where {norm} stands beside it",
        asks=("structure", "other"),
    )


def _none_takes_an_older_stream(case: Case, flowing: Flow) -> None:
    """Require that no sum adds to what the sublayer before had added to, where it takes what that gave."""
    older = older_streams(flowing.seen, flowing.width)
    count = case.apply(passed_by, flowing.seen, flowing.width)
    place, before = older[0] if older else ("", "")
    case.require(
        count == 0,
        f"what {place or 'a linear map'} gives is added to the stream as it was before {before or 'the sum before'}",
        got=f"an older stream behind {', '.join(one or 'the model' for one, _ in older)}",
        expected="the stream that the sublayer takes, or takes through its norm",
        cause=lambda: (
            f"the residual of {place or 'a sublayer'} is the input of {before or 'the one before'}: what that gives "
            "goes on through this sublayer alone"
        ),
        asks=("structure", "other"),
    )


def passed_by(seen: Traced, width: int) -> Tensor:
    """Return how many sublayers add to the stream of the one before, whose sum they take."""
    return torch.tensor(len(older_streams(seen, width)))


def raw_sublayers(seen: Traced) -> Tensor:
    """Return how many sublayers take what a norm takes, and not what one gives."""
    return torch.tensor(len(past_their_norm(seen)))


def _every_layer_adds(case: Case, flowing: Flow) -> None:
    """Require that the stream goes on beside every sublayer, where it does beside one of the same name."""
    lost = without_stream(flowing.seen, flowing.width)
    count = case.apply(lost_streams, flowing.seen, flowing.width)
    place, other = lost[0] if lost else ("", "")
    case.require(
        count == 0,
        f"what {place} gives goes on without the stream, where what {other} gives is added to it",
        got=f"F(x) alone behind {', '.join(one for one, _ in lost)}",
        expected="x + F(x) in every layer",
        cause=lambda: f"the residual connection around {place} is missing: the next part takes what it gives, alone",
        asks=("structure", "other"),
    )


def lost_streams(seen: Traced, width: int) -> Tensor:
    """Return how many sublayers lose the stream that others of their name keep."""
    return torch.tensor(len(without_stream(seen, width)))


def _one_place_of_norms(case: Case, flowing: Flow) -> None:
    """Require that norms stand before all sublayers, or behind all."""
    known = [s for s in sublayers(flowing.seen, flowing.width) if s.norm]
    if len(known) < 2:
        return
    usual = max(("pre", "post"), key=lambda place: sum(s.norm == place for s in known))
    odd = next((s for s in known if s.norm != usual), known[0])
    mixed = case.apply(other_places, flowing.seen, flowing.width, usual)
    told = {
        "pre": "is added to the stream before a norm of which it took the output",
        "post": "is added to the very tokens that it took",
    }
    case.require(
        mixed == 0,
        f"what {odd.place or 'a linear map'} gives {told[odd.norm]}, unlike what other sublayers give",
        got=f"{int(mixed)} of {len(known)} sublayers",
        expected="norms before all sublayers, or behind all",
        cause=lambda: (
            f"the residual of {odd.place or 'a sublayer'} starts on the other side of the norm than elsewhere"
        ),
        asks=("structure", "other"),
    )


def sum_factors(seen: Traced, width: int) -> Tensor:
    """Return `[N, 2]`: by what each residual sum takes the stream, and what is added."""
    return torch.tensor([[s.stream, s.branch] for s in residual_sums(seen, width)], dtype=torch.float64)


def _off(one: Sum) -> float:
    return max(abs(one.stream - 1), abs(one.branch - 1))


def _sum_words(odd: Sum, wrong: int, count: int) -> str:
    what, factor = ("the stream", odd.stream) if abs(odd.stream - 1) > _NEAR else ("what it gives", odd.branch)
    where = "every sum" if wrong == count else f"{wrong} of {count} sums"
    return f"{what} is taken {factor:.4g} times behind {odd.place or 'a linear map'} ({where})"

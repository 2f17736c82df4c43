"""ALiBi's slopes inside a whole model; part of `anatomy.positions`."""

from __future__ import annotations

import torch
from torch import Tensor

from veriformer.properties.anatomy.attention import Attention, followed, past
from veriformer.properties.anatomy.flow import Flow, is_far
from veriformer.properties.anatomy.traced import Traced
from veriformer.properties.engine.case import Case
from veriformer.properties.formulas.relative_biases import slope_cause, slopes_by

_GEOMETRIC = ("slopes", "geometric")


def slopes_are_those_of_alibi(case: Case, flowing: Flow) -> None:
    """Require that what is added to the scores of a self-attention falls by the published slopes, head by head."""
    if is_far(case):  # a steep slope leaves far keys no weight to read a bias off
        case.reject("far keys may have no weight")
    known = over_themselves(flowing.seen, flowing.length, flowing.other)
    if not known:
        case.does_not_apply("no attention of a sequence over itself could be followed from its scores to its weights")
    heads, taken = flowing.built.config.num_heads, 0
    case.witness()
    case.subject.fact("positions")  # what is asked for counts as verified
    rule = case.subject.fact("slopes")
    for number, attention in enumerate(known):
        bias = case.apply(past_bias, flowing.seen, flowing.length, flowing.other, number)
        slopes = slopes_by(rule, max(heads, len(bias)))
        first, taken = taken % len(slopes), taken + len(bias)  # heads may be computed one after another, or in groups
        own = slopes[first : first + len(bias)]
        expected = case.apply(expected_bias, flowing.seen, flowing.length, flowing.other, number, own)
        place = attention.place or "the model"
        case.close(
            bias,
            expected,
            f"the bias in {place} is not that of ALiBi",
            bound=1e3 * flowing.limit,
            constants_allowed=True,
            cause=lambda b=bias, e=expected, o=own, a=attention: _slope_cause(b, e, o, a),  # type: ignore[misc]
            asks=_GEOMETRIC if _is_geometric(bias, expected, own, first, heads) else None,
        )


def _is_geometric(bias: Tensor, expected: Tensor, own: Tensor, first: int, heads: int) -> bool:
    """Whether the slopes are those of the other rule, where `own` were to be those of the heads from `first` on."""
    other = slopes_by("geometric", max(heads, first + len(own)))[first : first + len(own)]
    return bool((bias - (other / own)[:, None, None] * expected).abs().amax() < 1e-5)


def over_themselves(seen: Traced, length: int, other: int) -> list[Attention]:
    """Return the attentions of a sequence over itself that could be followed, in order."""
    return [a for a in followed(seen) if a.is_over(length, other)]


def past_bias(seen: Traced, length: int, other: int, number: int) -> Tensor:
    """Return `[H, T, T]`: what is added to the scores of keys at or before a query, of mean 0 in each row."""
    found = over_themselves(seen, length, other)[number]
    return past(found.bias, ~found.hidden)


def expected_bias(seen: Traced, length: int, other: int, number: int, slopes: Tensor) -> Tensor:
    """Return `[H, T, T]`: the bias of ALiBi with these slopes, under the mask of an attention, as of `past_bias`."""
    visible = ~over_themselves(seen, length, other)[number].hidden
    at = torch.arange(visible.shape[-1], dtype=torch.float64)
    return past(slopes[:, None, None] * (at[None, :] - at[:, None]), visible)


def _slope_cause(bias: Tensor, expected: Tensor, slopes: Tensor, attention: Attention) -> str | None:
    """Say by how much the slopes differ, head by head, or by which rule they are made."""
    place = attention.place or "the model"
    square = expected.square().sum((1, 2)).clamp(min=1e-300)
    ratio = (bias * expected).sum((1, 2)) / square
    if not bool(bias.abs().amax() > 1e-6):
        return f"no bias is added to the scores in {place}"
    straight = float((bias - ratio[:, None, None] * expected).abs().amax()) < 1e-3
    if not straight:
        return f"the bias in {place} does not grow in proportion to the distance"
    told = ", ".join(f"{r:.4g}" for r in ratio.tolist())
    scales = [float(x) for x in attention.scale if x is not None]
    if len(scales) == len(ratio) and bool((ratio - torch.tensor(scales, dtype=ratio.dtype)).abs().amax() < 1e-3):
        return f"every slope in {place} is multiplied by the attention's scale: the bias is added before scaling"
    if (rule := slope_cause(ratio * slopes, slopes)) and "times those" not in rule:
        return f"in {place} {rule}"
    if bool((ratio + 1).abs().amax() < 1e-3):
        return f"the bias in {place} has the other sign: it favours distant keys"
    if bool((ratio - ratio[0]).abs().amax() < 1e-3):
        return f"every slope in {place} is {float(ratio[0]):.4g} times the published one"
    return f"the slopes in {place} are {told} times the published ones, head by head"

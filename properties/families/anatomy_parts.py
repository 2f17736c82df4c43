"""Norms and activations inside a whole model, each judged by the numbers that flow through it."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from veriformer.properties.anatomy.attention import attentions
from veriformer.properties.anatomy.feed_forward import Between, between_linear_maps, curves
from veriformer.properties.anatomy.flow import Flow, flow
from veriformer.properties.anatomy.norms import (
    NormCall,
    held,
    held_eps,
    norm_calls,
    normalised,
    norms_at_the_end,
    stands_behind_norm,
)
from veriformer.properties.anatomy.sublayers import norms_in_code, sublayers
from veriformer.properties.anatomy.traced import Traced
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.premises import needs_fact, needs_module
from veriformer.properties.engine.property import holds
from veriformer.properties.families.anatomy_repeats import no_norm_takes_what_one_gave
from veriformer.properties.families.anatomy_widths import norms_of_a_small_model_stay_norms
from veriformer.properties.families.norm_axes import none_is_over_another_axis
from veriformer.properties.formulas.norms import eps_cause, norm_cause

KINDS = ("layer", "encoder", "decoder", "encoder_decoder", "classifier")
_NAMES = {"relu": ("relu", False), "gelu": ("gelu", False), "gelu_tanh": ("gelu_tanh", False), "swiglu": ("silu", True)}
_WORDS = {"layer": "LayerNorm", "rms": "RMSNorm"}
_NEAR = 1e-3
"""A factor further off is another one: those of float32 are fitted to 1e-4."""
_OF_CODES = 0.02
"""The same of numbers that are rounded to eight bits in front of the map: half a step is 1 of 254."""
_SMALL = 1e-3
"""Size of tokens whose variance is that of an ordinary eps."""


@holds(
    "anatomy.feed-forward",
    statement="Between the linear maps of every feed-forward network inside a model stands the declared activation.",
    formula="y = W_2 f(W_1 x + b_1) + b_2 with the declared f; swiglu: y = W_2 (silu(W_1 x) * W_3 x)",
    source="Vaswani et al. 2017, equation 2; Hendrycks and Gimpel 2016; Shazeer 2020.",
    kinds=KINDS,
    unless=(needs_module, needs_fact("activation", *_NAMES)),
    examples_factor=0.2,
)
def the_activation_is_the_declared_one(case: Case) -> None:
    """ReLU and GELU give models that train alike; the numbers between the maps tell which it is, layer by layer."""
    flowing = flow(case)
    width, inner = flowing.width, flowing.built.config.d_ff
    known = _networks(flowing.seen, width, inner)
    wanted = str(case.subject.fact("activation"))
    name, is_gated = _NAMES[wanted]
    if not known:
        _no_other_curve(case, flowing, name, is_gated)
        return
    wrong = case.apply(other_activations, flowing.seen, width, inner, name, is_gated)
    odd = next((b for b in known if _is_other(b, name, is_gated)), known[0])
    case.witness()
    case.require(
        wrong == 0,
        f"in {odd.place or 'the model'} the activation is {_told(odd)}, where {wanted} is declared",
        got=_told(odd),
        expected=wanted,
        cause=lambda: f"the activation in {odd.place or 'the model'} is {_told(odd)}",
        asks=("activation", "other") if odd.odd.startswith("times") else None,
    )
    if not is_gated and len(curves(flowing.seen, width, inner)) > len(known):
        _no_other_curve(case, flowing, name, is_gated)


def _no_other_curve(case: Case, flowing: Flow, name: str, is_gated: bool) -> None:
    """Require that a function of one number between the maps, which has no name here, is the declared one."""
    found = [] if is_gated else curves(flowing.seen, flowing.width, flowing.built.config.d_ff)
    if not found:
        case.does_not_apply("no activation between two linear maps was recognised")
    off = case.apply(off_the_curve, flowing.seen, flowing.width, flowing.built.config.d_ff, name)
    odd = found[0]
    case.witness()
    case.require(
        off < (_OF_CODES if case.subject.fact("quantised") else _NEAR),
        f"in {odd.place or 'the model'} the activation is not {name}, which is declared",
        got=f"{float(off):.3g} of its size apart",
        expected=name,
        cause=lambda: f"the activation in {odd.place or 'the model'} is {odd.told()}",
    )


def off_the_curve(seen: Traced, width: int, inner: int, name: str) -> Tensor:
    """Return how far the activations are from a known one, relative to their size."""
    return torch.tensor(max(curve.apart(name) for curve in curves(seen, width, inner)))


def other_activations(seen: Traced, width: int, inner: int, name: str, is_gated: bool) -> Tensor:
    """Return how many feed-forward networks have another activation."""
    found = _networks(seen, width, inner)
    return torch.tensor(sum(_is_other(b, name, is_gated) for b in found))


def _is_other(between: Between, name: str, is_gated: bool) -> bool:
    return (between.activation, between.is_gated, between.odd) != (name, is_gated, "")


def _networks(seen: Traced, width: int, inner: int) -> list[Between]:
    """Return what stands in feed-forward networks: maps from the width of the model to d_ff or more, and back."""
    around = [b for b in between_linear_maps(seen) if (b.inner, b.outer) == (width, width)]
    both = [b for b in around if b.width >= width or b.width == inner]
    whole = [b for b in both if b.width == inner]
    return [b for b in whole or both if b.activation != "identity" or b.width == inner != width]


def _told(between: Between) -> str:
    if between.activation == "identity":
        return (
            "none at all: one linear map follows the other" if not between.is_gated else "a product without activation"
        )
    if between.odd:
        return f"{between.activation} {between.odd}"
    return f"{between.activation}, gated" if between.is_gated else between.activation


@holds(
    "anatomy.norm",
    statement="Norms inside a model follow the declared formula, and stand where they are declared to stand.",
    formula="LN(x) = g (x - mean) / sqrt(var + eps) + b; pre-LN: q, k, v = W LN(x); final_norm: y = W LN(x_N)",
    source="Ba et al. 2016, equation 4; Zhang and Sennrich 2019, equation 4; Xiong et al. 2020, figure 1.",
    kinds=KINDS,
    unless=(needs_module, needs_fact("norm", "layer", "rms")),
    examples_factor=0.2,
    goes_wide=True,
)
def norms_follow_the_declared_formula(case: Case) -> None:
    """Each is held to the tokens that reach it, and how its eps enters to small ones. Norms over d_head channels, of
    queries and keys, may be others, but over heads, positions or samples nothing is to be normalised (a question, since
    some attention does so by design). In a pre-LN model queries, keys and values pass a norm, all or none of them; what
    gives the output takes what the last norm gave, where final_norm says so. What is a norm in a
    small model is one in a wide one too, of a width that is no whole number of lanes.
    """
    flowing = flow(case)
    none_is_over_another_axis(case, flowing)
    width, kind = flowing.width, str(case.subject.fact("norm"))
    known = _known(flowing.seen, kind, width)
    norms_of_a_small_model_stay_norms(case, flowing, kind)
    written = norms_in_code(flowing.seen, width)
    if written:
        others = case.apply(other_norms_in_code, flowing.seen, width, kind)
        case.witness()
        place, own = next((w for w in written if w[1] != kind), written[0])
        taken = "what is given out" if place == "the output" else f"what {place or 'a sublayer'} takes"
        case.require(
            others == 0,
            f"{taken} is not normalised by the declared norm",
            got=f"{_WORDS[own]} in {int(others)} of {len(written)} places",
            expected=_WORDS[kind],
            cause=lambda: f"the norm before {place or 'a sublayer'} is {_WORDS[own]}",
            asks=("norm", "other"),
        )
    if not known:
        if written:
            return
        case.does_not_apply("no module of it is known for a norm")
    wrong = case.apply(other_norms, flowing.seen, width, kind)
    odd, slip = next(((n, told) for n, told in known if told or n.kind != kind), known[0])
    case.witness()
    case.require(
        wrong == 0,
        f"{odd.place} is not the declared norm",
        got=slip or _WORDS.get(odd.kind, ""),
        expected=_WORDS[kind],
        cause=lambda: f"{odd.place}: {slip}" if slip else f"the formula of {odd.place} is {odd.kind}",
        asks=("norm", "other"),
    )
    _layers_have_one_eps(case, flowing)
    no_norm_takes_what_one_gave(case, flowing)
    if case.reaches and case.bench.settings.profile == "quick":
        return  # where norms stand, which costs more, does not go by the width
    placement = case.subject.declares.get("norm_placement")
    if placement == "pre":
        _projections_are_normalised(case, flowing)
    stack = case.subject.kind in ("encoder", "decoder", "encoder_decoder")
    if stack and placement in ("pre", "post"):
        _norms_stand_as_declared(case, flowing, placement)
    if stack and placement in ("pre", "post") and norms_at_the_end(flowing.seen, width) is not None:
        _the_end_is_the_declared_one(case, flowing, 1 if placement == "post" else 0)


def _layers_have_one_eps(case: Case, flowing: Flow) -> None:
    """Require that norms of one name have one eps in all layers."""
    odd = odd_eps(flowing.seen, flowing.width)
    count = case.apply(other_eps, flowing.seen, flowing.width)
    place, own, usual = odd[0] if odd else ("", 0.0, 0.0)
    case.require(
        count == 0,
        f"the eps of {place} is not that of the same norm in other layers",
        got=f"{own:g}",
        expected=f"{usual:g}",
        cause=lambda: f"the eps of {place} is {own:g}, elsewhere {usual:g}",
        asks=("structure", "other"),
    )


def odd_eps(seen: Traced, width: int) -> list[tuple[str, float, float]]:
    """Return the norms whose eps is another one than that of most of their name: path, eps, that of the others."""
    alike: dict[str, list[NormCall]] = {}
    for norm in norm_calls(seen):
        # one that is no attribute is the first that explains what flowed: another one may do so, too
        is_held = norm.kind and norm.given.shape[-1] == width and held_eps(norm.part) == norm.eps
        if is_held and re.search(r"\d", norm.place):
            alike.setdefault(re.sub(r"\d+", "*", norm.place), []).append(norm)
    found = []
    for group in alike.values():
        sizes = [n.eps for n in group]
        usual = max(sizes, key=sizes.count)
        found += [(n.place, n.eps, usual) for n in group if n.eps != usual]
    return found


def other_eps(seen: Traced, width: int) -> Tensor:
    """Return how many norms have another eps than those of their name in other layers."""
    return torch.tensor(len(odd_eps(seen, width)))


def other_norms(seen: Traced, width: int, kind: str) -> Tensor:
    """Return how many calls of norms over the model's width follow another formula that is known."""
    return torch.tensor(sum(bool(told) or n.kind != kind for n, told in _known(seen, kind, width)))


def other_norms_in_code(seen: Traced, width: int, kind: str) -> Tensor:
    """Return how many norms that are no modules follow another formula."""
    return torch.tensor(sum(own != kind for _, own in norms_in_code(seen, width)))


def _known(seen: Traced, kind: str, width: int) -> list[tuple[NormCall, str | None]]:
    """Return the norms over the model's width whose formula is known, each with what is wrong with it."""
    calls = [n for n in norm_calls(seen) if n.given.shape[-1] == width]
    told: list[str | None] = seen.once(("slips", kind, width), lambda: [_slip(n, kind, seen.limit) for n in calls])
    return [(n, slip) for n, slip in zip(calls, told, strict=True) if n.kind or slip]


def _slip(norm: NormCall, kind: str, limit: float) -> str | None:
    """Name the wrong formula that a norm follows with the gain and bias that it holds."""
    width = norm.given.shape[-1]
    x, y = (z.reshape(len(z), -1, width) if z.ndim > 2 else z[None] for z in (norm.given, norm.made))
    gain, bias = held(norm)
    bound = 10 * limit * float(y.abs().amax())
    for own in (gain, 1 + gain):  # a gain may be kept as its distance from 1
        if norm.kind and float((y - own * normalised(x, norm.kind, norm.eps) - bias).abs().amax()) <= bound:
            return _eps_outside(norm, own, bias) if norm.kind == kind else None
    return norm_cause(lambda _: y, x, gain, bias, norm.eps or 1e-5, kind == "layer", bound)


def _eps_outside(norm: NormCall, gain: Tensor, bias: Tensor) -> str | None:
    """Tell an eps that is added to the root by small tokens: those of ordinary size hardly show it."""
    like = next(norm.part.parameters(), norm.given)
    tokens = norm.given.reshape(-1, norm.given.shape[-1])
    tokens = tokens / tokens.std(-1, keepdim=True)

    def call(x: Tensor) -> Tensor:
        with torch.no_grad():
            made: Tensor = norm.part(x.to(like).reshape(norm.given.shape))
        return made.cpu().double().reshape(x.shape)

    at = tokens * _SMALL
    inside = gain * normalised(at, norm.kind, norm.eps) + bias
    try:
        if float((call(at) - inside).abs().amax()) <= _NEAR * float(inside.abs().amax()):
            return None
        told = eps_cause(call, tokens, gain, bias, norm.eps, norm.kind == "layer")
    except Exception:  # it takes more than tokens
        return None
    return told if told and "outside" in told else None


def _projections_are_normalised(case: Case, flowing: Flow) -> None:
    """Require that what makes the queries, keys and values of a self-attention has passed a norm, each of them."""
    found = _raw(flowing.seen, flowing.length)
    if not found:
        return
    case.subject.fact("norm_placement")  # what is asked for counts as verified
    raw = case.apply(raw_projections, flowing.seen, flowing.length)
    place, which = next(((p, w) for p, parts in found for w, is_normed in parts.items() if not is_normed), ("", ""))
    case.require(
        raw == 0,
        f"the {which} of {place or 'the model'} are made of what no norm gave, where norm_placement='pre' is declared",
        got="the stream as it is",
        expected="the normalised stream",
        cause=lambda: f"in {place} the {which} take what was not normalised",
    )


def raw_projections(seen: Traced, length: int) -> Tensor:
    """Return how many of the queries, keys and values of self-attentions are made of what no norm gave."""
    return torch.tensor(sum(not is_normed for _, parts in _raw(seen, length) for is_normed in parts.values()))


def _raw(seen: Traced, length: int) -> list[tuple[str, dict[str, bool]]]:
    """Return for each self-attention whether its queries, keys and values are made of normalised tokens.

    Attentions of which no projection takes what a module of norm gave say nothing: their norms are not modules.
    """
    norms, products = norm_calls(seen), {p.when: p for p in seen.products}
    found = []
    for a in attentions(seen):
        if not a.is_over(length):
            continue
        parts: dict[str, bool] = {}
        for word, sources in (("queries", a.query_from), ("keys", a.key_from), ("values", a.value_from)):
            makers = [products[s.when].left for s in sources if s is not None and s.when in products]
            if makers:
                parts[word] = all(stands_behind_norm(x, norms, products.values(), seen.limit) for x in makers)
        if any(parts.values()):
            found.append((a.place, parts))
    return found


def _norms_stand_as_declared(case: Case, flowing: Flow, placement: str) -> None:
    """Require that not all sublayers have their norms on the other side; single ones may go without."""
    known = [s for s in sublayers(flowing.seen, flowing.width) if s.norm]
    if len(known) < 2:
        return
    wrong = case.apply(other_places, flowing.seen, flowing.width, placement)
    told = {"pre": "takes what a norm gave", "post": "takes the stream as it is"}
    case.require(
        wrong < len(known),
        f"every sublayer {told[known[0].norm]}, where norm_placement={placement!r} is declared",
        got=f"{known[0].place or 'the model'} {told[known[0].norm]}",
        expected=f"{known[0].place or 'the model'} {told[placement]}",
        cause=lambda: f"{known[0].place or 'the model'} and all others: the norms stand on the other side",
    )


def _the_end_is_the_declared_one(case: Case, flowing: Flow, own: int) -> None:
    """Require that a norm follows the last layer's own, or none does."""
    declared = case.subject.fact("final_norm")
    if declared is None:
        return
    count = case.apply(last_norms, flowing.seen, flowing.width)
    wanted = own + bool(declared)
    told = f"{int(count) - own if count > own else 'no'} norm follows the last layer"
    case.require(
        count == wanted,
        f"{told}, where final_norm={declared} is declared",
        got=told,
        expected="one" if declared else "none",
        cause=lambda: told,
    )


def last_norms(seen: Traced, width: int) -> Tensor:
    """Return how many norms stand between the last sum of the stream and the output; -1 where that is not seen."""
    count = norms_at_the_end(seen, width)
    return torch.tensor(-1 if count is None else count)


def other_places(seen: Traced, width: int, usual: str) -> Tensor:
    """Return how many sublayers have their norm elsewhere than `usual`."""
    return torch.tensor(sum(s.norm not in ("", usual) for s in sublayers(seen, width)))

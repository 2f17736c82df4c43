"""Norms, activations and residual sums inside a whole model, each judged by the numbers that flow through it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from veriformer.properties.anatomy.attention import attentions
from veriformer.properties.anatomy.feed_forward import Between, between_linear_maps
from veriformer.properties.anatomy.flow import BATCH, flow
from veriformer.properties.anatomy.norms import NormCall, norm_calls, normalised, stands_behind_norm
from veriformer.properties.anatomy.residual import Sum, residual_sums
from veriformer.properties.anatomy.traced import traced
from veriformer.properties.causes.structure import off_the_record
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.premises import excludes_fact, needs_fact, needs_module
from veriformer.properties.engine.property import holds
from veriformer.properties.formulas.norms import norm_cause
from veriformer.properties.probes.module_parts import is_norm

KINDS = ("layer", "encoder", "decoder", "encoder_decoder", "classifier")
_NAMES = {"relu": ("relu", False), "gelu": ("gelu", False), "gelu_tanh": ("gelu_tanh", False), "swiglu": ("silu", True)}


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
    seen = flow(case)
    width, inner = seen.built.config.d_model, seen.built.config.d_ff
    with off_the_record(case):
        known = _networks(between_linear_maps(seen.traced(), seen.limit), width, inner)
    if not known:
        case.does_not_apply("no activation between two linear maps was recognised")
    wanted = str(case.subject.fact("activation"))
    name, is_gated = _NAMES[wanted]
    wrong = case.apply(other_activations, seen.module, seen.run, seen.limit, width, inner, name, is_gated)
    odd = next((b for b in known if (b.activation, b.is_gated) != (name, is_gated)), known[0])
    case.witness()
    case.require(
        wrong == 0,
        f"in {odd.place or 'the model'} the activation is {_told(odd)}, where {wanted} is declared",
        got=_told(odd),
        expected=wanted,
        cause=lambda: f"the activation in {odd.place or 'the model'} is {_told(odd)}",
    )


def other_activations(
    module: nn.Module, run: Callable[[], Any], limit: float, width: int, inner: int, name: str, is_gated: bool
) -> Tensor:
    """Return how many feed-forward networks have another activation."""
    found = _networks(between_linear_maps(traced(module, run), limit), width, inner)
    return torch.tensor(sum((b.activation, b.is_gated) != (name, is_gated) for b in found))


def _networks(found: list[Between], width: int, inner: int) -> list[Between]:
    """Keep what stands in feed-forward networks: maps from the width of the model to more channels, and back."""
    both = [b for b in found if (b.inner, b.outer) == (width, width) and b.width >= width]
    whole = [b for b in both if b.width == inner]
    return [b for b in whole or both if b.activation != "identity" or b.width == inner != width]


def _told(between: Between) -> str:
    if between.activation == "identity":
        return (
            "none at all: one linear map follows the other" if not between.is_gated else "a product without activation"
        )
    return f"{between.activation}, gated" if between.is_gated else between.activation


def _norm_names(module: nn.Module) -> tuple[set[str], dict[str, float]]:
    names = {name for name, part in module.named_modules() if is_norm(part)}
    eps = {}
    for name, part in module.named_modules():
        value = getattr(part, "eps", getattr(part, "variance_epsilon", None))
        if name in names and isinstance(value, float):
            eps[name] = value
    return names, eps


def norms_of(module: nn.Module, run: Callable[[], Any], limit: float) -> list[NormCall]:
    """Return the calls of the norms of a model."""
    names, eps = _norm_names(module)
    return norm_calls(traced(module, run), names, limit, eps)


@holds(
    "anatomy.norm",
    statement="Norms inside a model follow the declared formula; queries, keys and values of a pre-LN model pass one.",
    formula="LN(x) = g (x - mean) / sqrt(var + eps) + b; pre-LN: q, k, v = W LN(x)",
    source="Ba et al. 2016, equation 4; Zhang and Sennrich 2019, equation 4; Xiong et al. 2020, figure 1.",
    kinds=KINDS,
    unless=(needs_module, needs_fact("norm", "layer", "rms")),
    examples_factor=0.2,
)
def norms_follow_the_declared_formula(case: Case) -> None:
    """Each is held to the tokens that reach it. Norms over d_head channels, of queries and keys, may be others."""
    seen = flow(case)
    width, kind = seen.built.config.d_model, str(case.subject.fact("norm"))
    with off_the_record(case):
        calls = [n for n in norms_of(seen.module, seen.run, seen.limit) if n.given.shape[-1] == width]
    slips = {id(n): _slip(n, kind, seen.module, seen.limit) for n in calls}
    known = [n for n in calls if n.kind or slips[id(n)]]
    if not known:
        case.does_not_apply("no module of it is known for a norm")
    wrong = case.apply(other_norms, seen.module, seen.run, seen.limit, width, kind)
    odd = next((n for n in known if n.kind != kind or slips[id(n)]), known[0])
    case.witness()
    case.require(
        wrong == 0,
        f"{odd.place} is not the declared norm",
        got=slips[id(odd)] or {"layer": "LayerNorm", "rms": "RMSNorm"}.get(odd.kind, ""),
        expected={"layer": "LayerNorm", "rms": "RMSNorm"}[kind],
        cause=lambda: (
            f"{odd.place}: {slips[id(odd)]}" if slips[id(odd)] else f"the formula of {odd.place} is {odd.kind}"
        ),
    )
    if case.subject.fact("norm_placement") == "pre":
        _projections_are_normalised(case, seen.module, seen.run, seen.limit, seen.length)


def other_norms(module: nn.Module, run: Callable[[], Any], limit: float, width: int, kind: str) -> Tensor:
    """Return how many calls of norms over the model's width follow another formula that is known."""
    calls = [n for n in norms_of(module, run, limit) if n.given.shape[-1] == width]
    slips = [_slip(n, kind, module, limit) for n in calls]
    return torch.tensor(
        sum(bool(told) or n.kind != kind for n, told in zip(calls, slips, strict=True) if n.kind or told)
    )


def _slip(norm: NormCall, kind: str, module: nn.Module, limit: float) -> str | None:
    """Name the wrong formula that a norm follows with the gain and bias that it holds."""
    width = norm.given.shape[-1]
    x, y = (z.reshape(len(z), -1, width) if z.ndim > 2 else z[None] for z in (norm.given, norm.made))
    gain, bias = torch.ones(width, dtype=torch.float64), torch.zeros(width, dtype=torch.float64)
    for name, parameter in module.get_submodule(norm.place).named_parameters(recurse=False):
        if parameter.shape == (width,):
            if any(word in name for word in ("bias", "beta", "shift")):
                bias = parameter.detach().double()
            else:
                gain = parameter.detach().double()
    bound = 10 * limit * float(y.abs().amax())
    for own in (gain, 1 + gain):  # a gain may be kept as its distance from 1
        if norm.kind and float((y - own * normalised(x, norm.kind, norm.eps) - bias).abs().amax()) <= bound:
            return None
    return norm_cause(lambda _: y, x, gain, bias, norm.eps or 1e-5, kind == "layer", bound)


def _projections_are_normalised(
    case: Case, module: nn.Module, run: Callable[[], Any], limit: float, length: int
) -> None:
    """Require that what makes the queries, keys and values of a self-attention has passed a norm, each of them."""
    raw = case.apply(raw_projections, module, run, limit, length)
    with off_the_record(case):
        found = _raw(module, run, limit, length)
    place, which = next(((p, w) for p, parts in found for w, is_normed in parts.items() if not is_normed), ("", ""))
    case.require(
        raw == 0,
        f"the {which} of {place or 'the model'} are made of what no norm gave, where norm_placement='pre' is declared",
        got="the stream as it is",
        expected="the normalised stream",
        cause=lambda: f"in {place} the {which} take what was not normalised",
    )


def raw_projections(module: nn.Module, run: Callable[[], Any], limit: float, length: int) -> Tensor:
    """Return how many of the queries, keys and values of self-attentions are made of what no norm gave."""
    return torch.tensor(
        sum(not is_normed for _, parts in _raw(module, run, limit, length) for is_normed in parts.values())
    )


def _raw(module: nn.Module, run: Callable[[], Any], limit: float, length: int) -> list[tuple[str, dict[str, bool]]]:
    """Return for each self-attention whether its queries, keys and values are made of normalised tokens.

    Attentions of which no projection takes what a module of norm gave say nothing: their norms are not modules.
    """
    names, eps = _norm_names(module)
    trace = traced(module, run)
    norms = norm_calls(trace, names, limit, eps)
    products = {p.when: p for p in trace.products}
    found = []
    for a in attentions(trace, BATCH, limit):
        if a.hidden.shape[1:] != (length, length):
            continue
        parts: dict[str, bool] = {}
        for word, sources in (("queries", a.query_from), ("keys", a.key_from), ("values", a.value_from)):
            makers = [products[s.when].left for s in sources if s is not None and s.when in products]
            if makers:
                parts[word] = all(stands_behind_norm(x, norms, limit) for x in makers)
        if any(parts.values()):
            found.append((a.place, parts))
    return found


@holds(
    "anatomy.residual",
    statement="Every sum of a model's residual stream takes the stream once and what the sublayer gave once.",
    formula="x <- x + F(x): both with factor 1, in every sublayer of every layer",
    source="He et al. 2016, equation 1.",
    kinds=KINDS,
    unless=(needs_module, excludes_fact("residual", False), excludes_fact("structure", "other")),
    examples_factor=0.2,
)
def sums_take_both_once(case: Case) -> None:
    """A stream that is added twice, a branch that is halved, trains all the same. Models that weigh them by design
    (DeepNorm, macaron, ReZero) say structure="other".
    """
    seen = flow(case)
    width = seen.built.config.d_model
    with off_the_record(case):
        known = residual_sums(seen.traced(), width, seen.limit)
    if not known:
        case.does_not_apply("no sum of a stream and what a linear map gave was recognised")
    off = case.apply(sum_factors, seen.module, seen.run, seen.limit, width)
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


_NEAR = 1e-3
"""A factor further off is another one: those of float32 are fitted to 1e-4."""


def sum_factors(module: nn.Module, run: Callable[[], Any], limit: float, width: int) -> Tensor:
    """Return `[N, 2]`: by what each residual sum takes the stream, and what is added."""
    found = residual_sums(traced(module, run), width, limit)
    return torch.tensor([[s.stream, s.branch] for s in found], dtype=torch.float64)


def _off(one: Sum) -> float:
    return max(abs(one.stream - 1), abs(one.branch - 1))


def _sum_words(odd: Sum, wrong: int, count: int) -> str:
    what, factor = ("the stream", odd.stream) if abs(odd.stream - 1) > _NEAR else ("what it gives", odd.branch)
    where = "every sum" if wrong == count else f"{wrong} of {count} sums"
    return f"{what} is taken {factor:.4g} times behind {odd.place or 'a linear map'} ({where})"

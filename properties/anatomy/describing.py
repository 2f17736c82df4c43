"""The anatomy of a model as plain records: its parts in the order of the flow, in words and with measured constants."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from torch import Tensor

from veriformer.properties.anatomy.attention import Attention, attentions, past
from veriformer.properties.anatomy.entering import embedding_factor, first_rows, position_steps, sinusoid_misfit
from veriformer.properties.anatomy.feed_forward import between_linear_maps
from veriformer.properties.anatomy.flow import Flow
from veriformer.properties.anatomy.norms import NormCall, held, measured_gain, norm_calls
from veriformer.properties.anatomy.others import held_at, in_words, unnamed
from veriformer.properties.anatomy.residual import residual_sums
from veriformer.properties.anatomy.rotations import BASES, rotation_misfit, stands_still
from veriformer.properties.subject.facts import SCALES
from veriformer.reference.position_bias import alibi_slopes

_NEAR = 1e-3
_NONE = 1e-4  # a bias below is the rounding of float32 scores
_NORMS = {"layer": "LayerNorm", "rms": "RMSNorm"}


@dataclass(frozen=True)
class Part:
    """One part of a model that was recognised.

    Attributes:
        part: "embedding", "positions", "attention", "norm", "feed-forward", "residual", or "other" for a module with
            parameters of its own that is none of these.
        place: path of the module that computes it; "" for the model itself.
        words: what it is, one line.
        measured: its sizes and constants, by name.
    """

    part: str
    place: str
    words: str
    measured: dict[str, Any] = field(default_factory=dict)


def described(flowing: Flow) -> list[Part]:
    """Return the parts that are recognised in a forward, in the order in which they act."""
    seen, width = flowing.seen, flowing.width
    found: list[tuple[int, Part]] = [(a.when, _attention(a, flowing)) for a in attentions(seen)]
    found += [(n.when, _norm(n)) for n in norm_calls(seen)]
    for b in between_linear_maps(seen):
        if b.activation != "identity" or b.width == flowing.built.config.d_ff != b.inner:
            gate = ", gated" if b.is_gated else ""
            words = f"{b.activation}{f' {b.odd}' if b.odd else gate}, {b.inner} -> {b.width} -> {b.outer}"
            sizes = {"inner": b.inner, "width": b.width, "outer": b.outer}
            found.append((b.when, Part("feed-forward", b.place, words, {
                "activation": b.activation, "gated": b.is_gated, **sizes})))  # fmt: skip
    for s in residual_sums(seen, width):
        words = f"{_times(s.stream)}stream + {_times(s.branch)}what it gives"
        found.append((s.when, Part("residual", s.place, words, {"stream": s.stream, "branch": s.branch})))
    if (entering := embedding_factor(seen)) is not None:
        factor, place = entering
        is_root = abs(factor / width**0.5 - 1) < 2**-8
        words = f"{_times(factor)}rows of the table" + (" (sqrt(d_model))" if is_root else "")
        found.append((-2, Part("embedding", place, words, {"factor": factor})))
    if flowing.case.subject.takes_tokens and (told := _positions(flowing)):
        found.append((-1, told))
    places = [part.place for _, part in found]
    found += [(c.when, Part("other", c.place, words, told)) for c, told, words in unnamed(seen, places)]
    return [part for _, part in sorted(found, key=lambda f: f[0])]


def _times(factor: float) -> str:
    return "" if abs(factor - 1) < _NEAR else f"{factor:.5g} x "


def _norm(n: NormCall) -> Part:
    width = n.given.shape[-1]
    if not n.kind:
        return Part("norm", n.place, f"a norm of no known formula, {width} channels", {"kind": None, "width": width})
    gain, own = measured_gain(n), held(n)[0]
    ratio = float((gain / own).mean())
    words, told = f"{_NORMS[n.kind]}, {width} channels, eps {n.eps:g}", "the parameter"
    if bool((gain - 1 - own).abs().amax() < _NEAR):
        told = "1 + the parameter"
    elif bool((gain / own - ratio).abs().amax() > _NEAR):
        told = "not the parameter"
    elif abs(ratio - 1) > _NEAR:
        told = f"{ratio:.5g} x the parameter"
    words += f", gain {told}" if told != "the parameter" else ""
    return Part("norm", n.place, words, {"kind": n.kind, "width": width, "eps": n.eps, "gain": told})


def _attention(a: Attention, flowing: Flow) -> Part:
    heads, d_head = a.query.shape[1], a.query.shape[-1]
    groups = {(s.when, s.start) for s in a.key_from if s is not None}
    measured: dict[str, Any] = {"heads": heads, "groups": len(groups) or None, "d_head": d_head}
    words = [f"{heads} head{'s' * (heads > 1)} of {d_head} channels"]
    if groups and len(groups) < heads:
        words.append(f"{len(groups)} of keys and values")
    if a.is_followed(flowing.limit):
        scale, told = _scale(a, d_head, flowing.width)
        bias, kind = _bias(a)
        measured |= {"scale": scale, "mask": _mask(a.hidden), "bias": kind, "rotary": _rotation(a, flowing.limit)}
        words += [f"scale {told}", f"mask {measured['mask']}", bias]
        words += [measured["rotary"]] if measured["rotary"] else []
    else:
        measured |= {"scale": None, "mask": _mask(a.hidden), "misfit": float(a.misfit.max())}
        words.append(f"mask {measured['mask']}")
        if (capped := _soft_cap(a)) is None:
            words.append("its weights follow its scores by no one factor")
        else:
            measured |= dict(zip(("factor", "soft_cap"), capped, strict=True))
            words.append(f"soft cap {capped[1]:.5g} on {capped[0]:.5g} q k^T")
    if own := held_at(flowing.module, a.place):
        measured["parameters"] = own
        if not a.is_followed(flowing.limit):
            words.append(f"with {in_words(own)}")
    sums = a.weights.sum(-1)
    if a.over == "queries":
        words.append("softmax over the queries")
    elif float((sums - 1).abs().max()) > _NEAR:
        words.append(f"rows sum to {float(sums.min()):.4g} .. {float(sums.max()):.4g}")
    measured["row_sums"] = [float(sums.min()), float(sums.max())]
    return Part("attention", a.place, ", ".join(words), measured)


def _soft_cap(a: Attention) -> tuple[float, float] | None:
    """Return the factor f and the cap c where the weights follow c tanh(f q k^T / c) in all heads; None elsewhere."""
    from scipy.optimize import least_squares  # half a second, for the few models that need it

    raw, logs, seen = a.query @ a.key.mT, a.weights.clamp(min=1e-30).log(), ~a.hidden
    count = seen.sum(-1, keepdim=True).clamp(min=1)

    def centred(x: Tensor) -> Tensor:
        x = torch.where(seen, x, 0.0)
        return torch.where(seen, x - x.sum(-1, keepdim=True) / count, 0.0)

    def left(guess: Any) -> Any:
        factor, cap = (float(v) for v in guess)
        return (centred(cap * (factor * raw / cap).tanh()) - centred(logs)).flatten().numpy()

    start = float(a.factor.nanmean())
    fits = [least_squares(left, (start, cap)) for cap in (2.0, 10.0, 40.0)]
    best = min(fits, key=lambda fit: float(fit.cost))
    if abs(best.fun).max() > _NEAR:
        return None
    known = [q.factor * k.factor for q, k in zip(a.query_from, a.key_from, strict=True) if q and k]
    before = known[0] if len(known) == len(a.query_from) else 1.0
    return float(best.x[0]) * before, float(best.x[1])


def _scale(a: Attention, d_head: int, d_model: int) -> tuple[Any, str]:
    """Return the scale, or one a head where they differ, and in words."""
    known = [s for s in a.scale if s is not None]
    if len(known) < len(a.scale):  # normalised queries and keys have no source to be told by
        factors = [float(f) for f in a.factor]
        return None, f"{', '.join(f'{f:.5g}' for f in factors)} on what enters the product"
    if max(known) - min(known) > _NEAR * max(known):
        return known, ", ".join(f"{s:.5g}" for s in known) + " (head by head)"
    name = next((n for n, formula in SCALES.items() if abs(formula(d_head, d_model) / known[0] - 1) < _NEAR), "")
    return known[0], f"{known[0]:.5g}" + (f" = {name}" if name and name != "1" else "")


def _mask(hidden: Tensor) -> str:
    """Return the mask `[H, T, S]` in words."""
    if not bool(hidden.any()):
        return "none"
    if not bool((hidden == hidden[:1]).all()):
        return "another one for each head"
    own = hidden[0]
    if own.shape[0] == own.shape[1]:
        later = torch.ones_like(own).triu(1)
        if torch.equal(own, later):
            return "causal"
        for window in range(1, len(own)):
            near = torch.ones_like(own).triu(1 - window)
            if torch.equal(own, later | ~near):
                return f"causal, window of {window}"
            if torch.equal(own, ~(near & torch.ones_like(own).tril(window - 1))):
                return f"window of {window - 1} to either side"
        for prefix in range(2, len(own)):
            whole = later.clone()
            whole[:prefix, :prefix] = False
            if torch.equal(own, whole):
                return f"causal, prefix of {prefix}"
        if bool((own | ~later).all()):
            return f"causal, and {int((own & ~later).sum())} pairs besides"
    return f"{int(own.sum())} of {own.numel()} pairs hidden"


def _bias(a: Attention) -> tuple[str, str | None]:
    """Return the bias on the scores in words, and its kind; None for none."""
    if float(a.bias.abs().amax()) < _NONE:
        return "no bias", None
    if a.bias.shape[1] == a.bias.shape[2] and (slopes := alibi_slopes_of(a.bias, ~a.hidden)) is not None:
        told = slopes.tolist()
        published = torch.tensor(alibi_slopes(len(told)), dtype=torch.float64)
        is_published = bool(((slopes / published - 1).abs() < _NEAR).all())
        words = "published slopes" if is_published else f"slopes {', '.join(f'{s:.4g}' for s in told)}"
        return f"ALiBi with {words}", "alibi"
    return f"a bias from {float(a.bias.min()):.3g} to {float(a.bias.max()):.3g}", "table"


def alibi_slopes_of(bias: Tensor, visible: Tensor) -> Tensor | None:
    """Return the slopes `[H]` of a bias that falls with the distance to keys of the past; None if it does not."""
    at = torch.arange(bias.shape[-1], dtype=torch.float64)
    line = past((at[None, :] - at[:, None]).expand_as(bias), visible)
    own = past(bias, visible)
    slopes = (line * own).sum((1, 2)) / line.square().sum((1, 2))
    is_straight = bool((own - slopes[:, None, None] * line).abs().amax() < _NEAR * max(1.0, float(own.abs().amax())))
    return slopes if is_straight else None


def _rotation(a: Attention, limit: float) -> str | None:
    """Return by what queries and keys are turned, in words; None where nothing is, or nothing is known."""
    if any(s is None for s in (*a.query_from, *a.key_from)) or not a.is_over(a.hidden.shape[-1]):
        return None
    if stands_still(a, limit):
        return None
    width = a.query.shape[-1]
    for part, base, layout in product((width, width // 2, width // 4), BASES, ("halves", "interleaved")):
        if part >= 2 and rotation_misfit(a, base, part, layout) < 1e3 * limit:
            return f"rotary of base {base:g}, {layout}" + (f", {part} of {width} channels" if part < width else "")
    return "turned by other angles than those of a known base"


def _positions(flowing: Flow) -> Part | None:
    """Return what is added to embeddings by position."""
    seen, width = flowing.repeated(), flowing.width
    sums = position_steps(seen, flowing.length, width)
    if not sums:
        return None
    for base, layout in product(BASES, ("interleaved", "halves")):
        if sinusoid_misfit(sums[-1], width, base, layout) < 1e3 * flowing.limit:
            measured = {"kind": "sinusoidal", "base": base, "layout": layout}
            return Part("positions", "", f"sinusoids of base {base:g}, {layout}, are added", measured)
    for first, name in first_rows(seen, flowing.module, flowing.length, width):
        rows = flowing.module.get_parameter(name).numel() // width
        measured = {"kind": "learned", "table": name, "rows": rows, "first": first}
        return Part("positions", name.rpartition(".")[0], f"a learned table of {rows} rows, from row {first}", measured)
    return Part("positions", "", "a table of no known form is added", {"kind": "other"})

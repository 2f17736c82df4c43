"""The norms of a model, told by what they do to the tokens that flow through them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from veriformer.properties.anatomy.residual import residual_sums
from veriformer.properties.anatomy.traced import ModuleCall, Product, Traced

_EPS = (0.0, 1e-12, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3)


@dataclass
class NormCall:
    """One call of a module that normalises.

    Attributes:
        place: its path.
        part: itself.
        kind: "layer", "rms", or "" where neither formula gives its output.
        given: `[..., D]` tokens, float64.
        made: `[..., D]`.
        eps: that explains it.
        when: number of values that were made before it ended.
    """

    place: str
    part: nn.Module
    kind: str
    given: Tensor
    made: Tensor
    eps: float
    when: int


def is_norm(module: nn.Module) -> bool:
    """Return whether a module is a normalization: by a name in its class's ancestry, and parameters all vectors."""
    own = list(module.parameters())  # a layer may be called so, too
    return any("norm" in c.__name__.lower() for c in type(module).__mro__) and all(p.ndim <= 1 for p in own)


def norm_calls(seen: Traced) -> list[NormCall]:
    """Return the calls of modules that are norms in a forward, in order.

    One inside of which a product is made runs a sublayer beside its norm (`AddNorm`, `PreNorm`): it is none itself.
    """
    found: list[NormCall] = seen.once(
        "norms", lambda: [_read(c, seen.limit) for c in seen.calls if is_norm(c.part) and not _runs_a_product(c, seen)]
    )
    return found


def _runs_a_product(call: ModuleCall, seen: Traced) -> bool:
    return any(call.since < p.when < call.when for p in seen.products)


def _read(call: ModuleCall, limit: float) -> NormCall:
    width = call.given.shape[-1]
    given, made = call.given.double(), call.made.double()
    x, y = given.reshape(-1, width), made.reshape(-1, width)
    own = held_eps(call.part)
    for kind in ("layer", "rms"):
        if own is not None and fits(y, normalised(x, kind, own), limit):
            return NormCall(call.place, call.part, kind, given, made, own, call.when)
        # the nearest one: without any, a token of zeros would be no number
        apart, eps = min((misfit(y, normalised(x, kind, e)), e) for e in _EPS)
        if apart <= limit:
            return NormCall(call.place, call.part, kind, given, made, eps, call.when)
    return NormCall(call.place, call.part, "", given, made, own or 0.0, call.when)


def held_eps(part: nn.Module) -> float | None:
    """Return the eps that a norm holds as an attribute; None where it is written in its code, or there is none."""
    names = ("eps", "variance_epsilon", "epsilon")
    return next((v for name in names if isinstance(v := getattr(part, name, None), float)), None)


def kind_between(given: Tensor, made: Tensor, limit: float) -> str:
    """Return the formula by which tokens are made of others, "layer" or "rms"; "" where neither does, or both do.

    A gain and a bias a channel may follow. Nothing is normalised where the tokens are a gain times the others.
    """
    width = given.shape[-1]
    if made.shape[-1] != width or made.numel() != given.numel():
        return ""
    x, y = given.double().reshape(-1, width), made.double().reshape(-1, width)
    if fits(y, x, limit):
        return ""
    kinds = [kind for kind in ("layer", "rms") if any(fits(y, normalised(x, kind, eps), limit) for eps in _EPS)]
    return kinds[0] if len(kinds) == 1 else ""


def held(norm: NormCall) -> tuple[Tensor, Tensor]:
    """Return the gain and the bias `[D]` that a norm holds, float64; ones and zeros where it has none."""
    width = norm.given.shape[-1]
    own = list(norm.part.named_parameters(recurse=False)) or norm.part.named_parameters()  # keras keeps them in a dict
    vectors = [(n, p.detach().cpu().double()) for n, p in own if p.shape == (width,)]
    shifts = [v for n, v in vectors if any(word in n for word in ("bias", "beta", "shift"))]
    gains = [v for _, v in vectors if not any(v is s for s in shifts)]
    ones, zeros = torch.ones(width, dtype=torch.float64), torch.zeros(width, dtype=torch.float64)
    gain, bias, *_ = [*gains[:1], *[ones] * (not gains), *shifts, *gains[1:], zeros]  # a second vector is the bias
    return gain, bias


def measured_gain(norm: NormCall) -> Tensor:
    """Return the gain `[D]` that explains what a norm of known kind gave best, float64."""
    width = norm.given.shape[-1]
    plain, made = normalised(norm.given, norm.kind, norm.eps).reshape(-1, width), norm.made.reshape(-1, width)
    middle = plain - plain.mean(0)
    return (middle * (made - made.mean(0))).sum(0) / middle.square().sum(0).clamp(min=1e-300)


def normalised(x: Tensor, kind: str, eps: float) -> Tensor:
    """Return tokens `[..., D]` normalised by LayerNorm or RMSNorm, without gain and bias."""
    if kind == "layer":
        x = x - x.mean(-1, keepdim=True)
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def fits(made: Tensor, plain: Tensor, limit: float) -> bool:
    """Whether a gain and a bias a channel explain tokens `[N, D]` by normalised ones; fewer than four say nothing."""
    return misfit(made, plain) <= limit


def misfit(made: Tensor, plain: Tensor) -> float:
    """Return what a gain and a bias a channel leave of tokens `[N, D]`, relative to their size; infinite if too few."""
    if len(made) < 4:
        return math.inf
    middle, base = plain - plain.mean(0), made - made.mean(0)
    gain = (middle * base).sum(0) / middle.square().sum(0).clamp(min=1e-300)
    error = (base - gain * middle).abs().amax() / made.abs().amax().clamp(min=1e-300)
    return float(error) if bool(error.isfinite()) else math.inf


def are_same_tokens(one: Tensor, other: Tensor, limit: float) -> bool:
    """Whether two tensors hold the same tokens, in any order of the axes before their channels."""
    a, b = (x.cpu().double().reshape(-1, x.shape[-1]) for x in (one, other))
    if a.shape != b.shape:
        return False
    size = float(a.abs().amax())
    if float((a.sum(0) - b.sum(0)).abs().amax()) > limit * size * len(a):
        return False  # the same tokens in any order have one sum
    return abs(float(a.square().sum() - b.square().sum())) <= limit * size**2 * b.numel()


def stands_behind_norm(taken: Tensor, norms: list[NormCall], maps: Iterable[Product], limit: float) -> bool:
    """Whether what a linear map takes is what a norm gave, in any order of its tokens' axes, or another map of that."""
    return any(are_same_tokens(norm.made, x, limit) for x in taken_before(taken, maps, limit) for norm in norms)


def taken_before(taken: Tensor, maps: Iterable[Product], limit: float) -> list[Tensor]:
    """Return what a linear map takes, and what the map before took where that gave it: two are one of low rank.

    Args:
        taken: `[..., D]`.
        maps: products of the forward.
        limit: relative, on what counts as the same.
    """
    return [taken, *(p.left for p in maps if are_same_tokens(p.output, taken, limit))]


def ends_of(seen: Traced, width: int) -> tuple[Tensor, Tensor, str] | None:
    """Return the last sum of the stream, what is given out or taken by the map that gives it, and that map's path."""
    sums = residual_sums(seen, width)
    if seen.output is None or not sums:
        return None
    last, taken, place = max(sums, key=lambda s: s.when), seen.output, ""
    for product in reversed(seen.products):
        if product.output.numel() == taken.numel() and torch.equal(product.output.flatten(), taken.flatten()):
            taken, place = product.left, product.place
            break
    return seen.values[last.when].output, taken, place


def norms_at_the_end(seen: Traced, width: int) -> int | None:
    """Return how many norms stand between the last sum of the stream and the output or the map that gives it.

    Args:
        seen: the trace of a forward.
        width: D.

    Returns:
        None where that is not seen: the output is made in another way.
    """
    ends = ends_of(seen, width)
    if ends is None:
        return None
    norms = norm_calls(seen)
    stream, taken, _ = ends
    for count in range(3):
        if are_same_tokens(stream, taken, seen.limit):
            return count
        following = next((n.made for n in norms if are_same_tokens(n.given, stream, seen.limit)), None)
        if following is None:
            return count + 1 if kind_between(stream, taken, seen.limit) else None
        stream = following
    return None

"""The norms of a model, told by what they do to the tokens that flow through them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from veriformer.properties.anatomy.traced import ModuleCall, Traced

_EPS = (0.0, 1e-12, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3)


@dataclass
class NormCall:
    """One call of a module that normalises.

    Attributes:
        place: its path.
        kind: "layer", "rms", or "" where neither formula gives its output.
        given: `[..., D]` tokens, float64.
        made: `[..., D]`.
        eps: that explains it.
        when: number of values that were made before it ended.
    """

    place: str
    kind: str
    given: Tensor
    made: Tensor
    eps: float
    when: int


def norm_calls(seen: Traced, names: set[str], limit: float, eps: dict[str, float]) -> list[NormCall]:
    """Return the calls of norms, in order.

    Args:
        seen: the trace of a forward.
        names: paths of modules that are norms by their names and parameters.
        limit: largest relative difference that is rounding.
        eps: of modules that say theirs.
    """
    return [_read(call, limit, eps.get(call.place)) for call in seen.calls if call.place in names]


def _read(call: ModuleCall, limit: float, eps: float | None) -> NormCall:
    width = call.given.shape[-1]
    given, made = call.given.double(), call.made.double()
    x, y = given.reshape(-1, width), made.reshape(-1, width)
    candidates = (eps, *_EPS) if eps is not None else _EPS
    for kind in ("layer", "rms"):
        for small in candidates:
            if fits(y, normalised(x, kind, small), limit):
                return NormCall(call.place, kind, given, made, small, call.when)
    return NormCall(call.place, "", given, made, eps or 0.0, call.when)


def normalised(x: Tensor, kind: str, eps: float) -> Tensor:
    """Return tokens `[N, D]` normalised by LayerNorm or RMSNorm, without gain and bias."""
    if kind == "layer":
        x = x - x.mean(-1, keepdim=True)
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def fits(made: Tensor, plain: Tensor, limit: float) -> bool:
    """Whether a gain and a bias a channel explain tokens `[N, D]` by normalised ones; fewer than four say nothing."""
    if len(made) < 4:
        return False
    middle, base = plain - plain.mean(0), made - made.mean(0)
    gain = (middle * base).sum(0) / middle.square().sum(0).clamp(min=1e-300)
    return bool((base - gain * middle).abs().amax() <= limit * made.abs().amax())


def stands_behind_norm(taken: Tensor, norms: list[NormCall], limit: float) -> bool:
    """Whether what a linear map takes is what a norm gave, in any order of its tokens' axes."""
    rows = taken.double().reshape(-1, taken.shape[-1])
    for norm in norms:
        made = norm.made.reshape(-1, norm.made.shape[-1])
        if made.shape != rows.shape:
            continue
        size = float(made.abs().amax())
        if float((made.sum(0) - rows.sum(0)).abs().amax()) > limit * size * len(rows):
            continue  # the same tokens in any order have one sum
        if float((made.square().sum() - rows.square().sum()).abs()) <= limit * size**2 * rows.numel():
            return True
    return False

"""Norms that follow their formula in a small model, and not in a wide one; part of `anatomy.norm`."""

from __future__ import annotations

import torch
from torch import Tensor

from veriformer.properties.anatomy.flow import Flow, is_far, of_small_model
from veriformer.properties.anatomy.norms import NormCall, norm_calls
from veriformer.properties.anatomy.traced import Traced
from veriformer.properties.engine.case import Case

_BLOCKS = (4, 8, 16, 32, 64, 128)


def norms_of_a_small_model_stay_norms(case: Case, flowing: Flow, kind: str) -> None:
    """Require of a wide model that modules of the classes which are the declared norm in a small one are it, too.

    Args:
        case: of `anatomy.norm`.
        flowing: its forward.
        kind: "layer" or "rms".
    """
    width = flowing.width
    unknown = _unknown(flowing.seen, width)
    if not case.reaches or is_far(case) or not unknown:
        return
    small = of_small_model(flowing)
    if small is None:
        return
    count = case.apply(lost_norms, flowing.seen, small.seen, width, small.width, kind)
    classes = _right(small.seen, small.width, kind)
    odd = next((n for n in unknown if _class(n) in classes), unknown[0])
    case.require(
        count == 0,
        f"{odd.place or 'a norm'} is the declared norm of {small.width} channels, and of {width} channels it is not",
        got="another formula",
        expected=f"one formula for {small.width} and {width} channels",
        cause=lambda: f"{odd.place or 'a norm'} of {width} channels: {_left_out(odd, kind, flowing.limit)}",
        asks=("norm", "other"),
    )


def lost_norms(seen: Traced, small: Traced, width: int, narrow: int, kind: str) -> Tensor:
    """Return how many calls of norms follow no formula that is known, where those of their class do in a small model.

    Args:
        seen: the trace of a wide model's forward.
        small: that of a small one.
        width: D of the wide one.
        narrow: D of the small one.
        kind: "layer" or "rms".
    """
    right = _right(small, narrow, kind)
    return torch.tensor(sum(_class(n) in right for n in _unknown(seen, width)))


def _unknown(seen: Traced, width: int) -> list[NormCall]:
    return [n for n in norm_calls(seen) if n.given.shape[-1] == width and not n.kind]


def _right(seen: Traced, width: int, kind: str) -> set[str]:
    """Return the classes of which every call over the model's width is the declared norm."""
    calls = [n for n in norm_calls(seen) if n.given.shape[-1] == width]
    return {_class(n) for n in calls} - {_class(n) for n in calls if n.kind != kind}


def _class(norm: NormCall) -> str:
    own = type(norm.part)  # a class may be made anew for each model
    return f"{own.__module__}.{own.__qualname__}"


def _left_out(norm: NormCall, kind: str, limit: float) -> str:
    """Say which channels the statistics leave out: those behind the last full block, of some size."""
    width = norm.given.shape[-1]
    x, made = norm.given.reshape(-1, width), norm.made.reshape(-1, width)
    for block in reversed(_BLOCKS):
        body = width // block * block
        if 0 < body < width:
            for whole in (True, False):
                middle = (x if whole else x[:, :body]).mean(-1, keepdim=True) * (kind == "layer")
                square = (x[:, :body] - middle).square().sum(-1, keepdim=True)
                for count in (width, body):
                    if _explains(made, (x - middle) / (square / count + norm.eps).sqrt(), limit):
                        return f"its mean square leaves out the last {width - body}, behind {body // block} of {block}"
    return "it is right in a small model and follows no known formula here"


def _explains(made: Tensor, plain: Tensor, limit: float) -> bool:
    """Whether a gain and a bias a channel, fitted to all tokens, give what was made; an eps shifts it by parts."""
    middle, base = plain - plain.mean(0), made - made.mean(0)
    gain = (middle * base).sum(0) / middle.square().sum(0).clamp(min=1e-300)
    return bool((base - gain * middle).abs().amax() <= max(limit, 1e-4) * made.abs().amax())

"""Norms over another axis than the channels, told by their numbers, however written; part of `anatomy.norm`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from veriformer.properties.anatomy.flow import Flow
from veriformer.properties.anatomy.traced import Traced, Value
from veriformer.properties.engine.case import Case

_MAKERS = ("div", "mul", "native_layer_norm", "native_group_norm", "_fused_rms_norm")
"""Operations that a norm ends in before its gain."""
_EVEN = 1e-3
"""Relative spread of sizes that are one number, eps of a norm among what moves them."""
_UNEVEN = 0.1
"""Spread of sizes of tokens that no norm over channels gave, and no large bias either, which makes all sums alike."""
_FEWEST = 3  # different sizes that must be seen: two are one number within `_EVEN` by chance


@dataclass(frozen=True)
class OddNorm:
    """Numbers that were normalised over another axis than the channels.

    Attributes:
        place: path of the module that does.
        axis: "heads", "positions", "samples" or "positions and channels".
        when: number among the values.
    """

    place: str
    axis: str
    when: int


def none_is_over_another_axis(case: Case, flowing: Flow) -> None:
    """Require that what is normalised, queries and keys among it, is so over its channels."""
    config = flowing.built.config
    sizes = (flowing.length, flowing.other), (config.num_heads, config.num_key_value_heads)
    odd = odd_norms(flowing.seen, *sizes)
    count = case.apply(norms_over_others, flowing.seen, *sizes)
    axis = odd[0].axis if odd else ""
    place = (odd[0].place if odd else "") or "the model"
    case.require(
        count == 0,
        f"in {place} numbers are normalised over {axis}, not over channels",
        got=f"sums of squares over {axis} that are one number",
        expected="a norm over the channels of each token, or of each head",
        cause=lambda: f"the norm in {place} runs over the wrong axis: over {axis}",
        asks=("structure", "other"),
    )


def norms_over_others(seen: Traced, lengths: tuple[int, ...], heads: tuple[int, ...]) -> Tensor:
    """Return how many norms run over heads, positions or samples."""
    return torch.tensor(len(odd_norms(seen, lengths, heads)))


def odd_norms(seen: Traced, lengths: tuple[int, ...], heads: tuple[int, ...]) -> list[OddNorm]:
    """Return what has size one over heads, positions or samples, and not over its channels, in order.

    Args:
        seen: the trace of a forward.
        lengths: of its sequences.
        heads: numbers of heads; one is no axis.
    """
    found: list[OddNorm] = seen.once(("odd norms", lengths, heads), lambda: [
        OddNorm(v.place, axis, v.when) for v in seen.values if (axis := _axis_of(v, seen.batch, lengths, heads))
    ])  # fmt: skip
    return found


def _axis_of(value: Value, batch: int, lengths: tuple[int, ...], heads: tuple[int, ...]) -> str:
    x = value.output
    if value.name not in _MAKERS or x.ndim not in (3, 4):
        return ""
    named = {"samples": [batch], "positions": list(lengths), "heads": [n for n in heads if n > 1]}
    axes = {word: [i for i, n in enumerate(x.shape) if n in sizes] for word, sizes in named.items()}
    channels = [i for i in range(x.ndim) if not any(i in found for found in axes.values())]
    if any(len(found) > 1 for found in axes.values()) or len(channels) != 1 or x.shape[channels[0]] == 1:
        return ""  # weights, or sizes that coincide: channels as many as heads in a table [1, T, D], say
    if sum(map(len, axes.values())) != x.ndim - 1 or not axes["positions"]:
        return ""
    if axes["samples"] and torch.equal(x.select(axes["samples"][0], 0), x.select(axes["samples"][0], 1)):
        return ""  # a table
    squares = x.double().square()
    own = channels[0]
    if not bool(squares.isfinite().all()) or _spread(squares, (own,)) < _UNEVEN:
        return ""
    for word in ("heads", "positions", "samples"):
        if axes[word] and x.shape[axes[word][0]] > 1 and _is_even(squares, (axes[word][0],), but=own):
            return word
    if axes["heads"] and _is_even(
        squares, (axes["heads"][0], own)
    ):  # all channels at once, before heads are told apart
        return ""
    return "positions and channels" if _is_even(squares, (axes["positions"][0], channels[0])) else ""


def _is_even(squares: Tensor, over: tuple[int, ...], but: int | None = None) -> bool:
    """Whether sums of squares over some axes are one number, or one for each channel, that is not 0."""
    return _spread(squares, over, but) <= _EVEN


def _spread(squares: Tensor, over: tuple[int, ...], but: int | None = None) -> float:
    """Return how far sums of squares over some axes are from one number, or one for each channel, relatively."""
    sums = squares.sum(over, keepdim=True)
    kept = [i for i in range(sums.ndim) if i not in over and i != but and sums.shape[i] > 1]
    if not kept or sums.numel() < _FEWEST:
        return torch.inf
    middle = sums.mean(kept, keepdim=True)
    return (
        float(((sums - middle).abs() / middle.clamp(min=1e-12)).amax()) if bool((middle > 1e-12).all()) else torch.inf
    )

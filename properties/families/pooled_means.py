"""A mean over positions weighs all of them alike; part of `padding.pooling`."""

from __future__ import annotations

import torch
from torch import Tensor

from veriformer.properties.diagnosis.masks.masked import Masked
from veriformer.properties.diagnosis.masks.pooled import weights_of_places
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.stream import Stream

_REAL = (6, 5)
"""Real positions of six: a number that no usual block divides, and one that leaves padding."""
_NEAR = 1e-3


def means_weigh_alike(case: Case, stream: Stream) -> None:
    """Require of a declared mean that the pooled vector is made of the states of real positions in equal shares.

    Where no module's states explain it by weights that are the same for several samples, nothing is required.
    """
    if case.subject.fact("pooling") != "mean" or case.subject.fact("padding_side") == "left":
        return
    for real in _REAL:
        found = case.apply(_rows, stream, real)
        shown = [_real_shares(weights, real) for weights in found]
        if not shown:
            continue
        case.require(
            any(float((share - 1 / len(share)).abs().max()) < _NEAR for share in shown),
            f"the pooled vector is no mean of the {real} real positions of {len(found[0])}",
            got=f"weights {_listed(shown[0])}",
            expected=f"1/{len(shown[0])} of each",
            cause=lambda share=shown[0]: _cause(share),  # type: ignore[misc]
            asks=("pooling", "other"),
        )


def _rows(stream: Stream, real: int) -> list[Tensor]:
    return weights_of_places(Masked(stream.case, stream), real)


def _real_shares(weights: Tensor, real: int) -> Tensor:
    """Return the weights of what is real: of a token put in front too, unless it has none."""
    more = len(weights) - _REAL[0]
    share = weights[: more + real]
    return share[more:] if float(share[:more].abs().sum()) < _NEAR else share


def _listed(weights: Tensor) -> str:
    return ", ".join(f"{w:.3g}" for w in weights.tolist())


def _cause(share: Tensor) -> str | None:
    """Say that parts are averaged first, of the size that explains the weights."""
    count = len(share)
    for size in range(2, count):
        starts = range(0, count, size)
        wanted = torch.cat(
            [torch.full((min(size, count - s),), 1 / min(size, count - s) / len(starts)) for s in starts]
        )
        if float((share - wanted).abs().max()) < _NEAR:
            return (
                f"blocks of {size} positions are averaged first, and then these means, whatever each block holds: the "
                "positions of a block that is not full weigh more"
            )
    if float((share.sum() - 1).abs()) > _NEAR:
        return f"the weights of the real positions sum to {float(share.sum()):.4g}, not to 1"
    return None

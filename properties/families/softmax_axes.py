"""Calls of a softmax along an axis, and the order in which the axes of its weights come out."""

from __future__ import annotations

import itertools

from torch import Tensor

from veriformer.properties.bench.pool import Built
from veriformer.properties.engine.case import Case


def softmaxed(case: Case, built: Built, scores: Tensor, dim: int = -1) -> Tensor:
    """Return the weights of scores along an axis, the last one for a subject that takes none.

    Raises:
        Violation: they do not have the shape of the scores.
    """
    weights = case.call(built, scores, dim) if case.subject.accepts("dim") else case.call(built, scores)
    case.equal(
        case.apply(sizes, weights),
        case.apply(sizes, scores),
        f"the weights of scores {list(scores.shape)} along axis {dim} have the shape {list(weights.shape)}",
        got=f"{list(weights.shape)}",
        expected=f"{list(scores.shape)}",
        cause=lambda: permuted_axes(weights, scores, dim),
    )
    return weights


def sizes(x: Tensor) -> list[int]:
    """Return the sizes of a tensor's axes."""
    return list(x.shape)


def permuted_axes(weights: Tensor, scores: Tensor, dim: int) -> str | None:
    """Say in which order the axes of right weights come out, where that is another one than that of the scores."""
    right = scores.detach().double().softmax(dim)
    for order in itertools.permutations(range(scores.ndim)):
        other = right.permute(order)
        if list(order) == sorted(order) or other.shape != weights.shape:
            continue
        if float((weights.detach().double() - other).abs().nan_to_num(nan=1.0).amax()) < 1e-2:
            axes = ", ".join(map(str, order))
            return (
                f"the weights along axis {dim} are right, and their axes come out in the order {axes}: an axis that "
                "was moved to the end is not moved back to its place (two axes exchanged, say)"
            )
    return None

"""The derivative of softmax, along whichever axis it is taken."""

from __future__ import annotations

import torch
from torch import Tensor

from veriformer.properties.bench.pool import Built
from veriformer.properties.definitions.attention import softmax_bound, softmax_oracle
from veriformer.properties.definitions.differences import size_of
from veriformer.properties.definitions.rounding import rounding_bound
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.premises import excludes_fact
from veriformer.properties.engine.property import holds
from veriformer.properties.families.softmax_axes import softmaxed


@holds(
    "softmax.jacobian",
    statement="The derivative of softmax is diag(p) - p p^T, finite for saturated and masked rows.",
    formula="d w_i / d x_j = w_i (delta_ij - w_j); rows of the Jacobian sum to 0",
    source="Derivative of the definition.",
    kinds=("softmax",),
    level="extended",
    unless=excludes_fact("sink"),
    catches=("PM02",),
)
def the_jacobian_is_the_known_one(case: Case) -> None:
    """Checked as vector-Jacobian products with random vectors; one row is saturated, one has masked entries. A subject
    that takes an axis is asked about another one, too: a backward that is written by hand has to sum along it.
    """
    built = case.built()
    width = case.integer("S", 2, 9)
    scores = case.normal(4, width, dtype=built.dtype, scale=2.0)
    scores[1, 0] = 60.0
    scores[2, 0] = -torch.inf
    _compare(case, built, scores, -1, "the gradient is not that of softmax")
    if case.subject.accepts("dim"):
        dim = case.choice("dim", (0, 1))
        other = case.normal(3, 4, width, dtype=built.dtype, scale=2.0)
        _compare(
            case, built, other, dim, f"the gradient of softmax along axis {dim} is not that of each slice along it"
        )
    case.witness()


def _compare(case: Case, built: Built, scores: Tensor, dim: int, otherwise: str) -> None:
    leaf = scores.detach().clone().requires_grad_()
    weights = softmaxed(case, built, leaf, dim)
    if not weights.requires_grad:
        case.reject("the subject gives no gradient")
    probe = case.normal(*scores.shape, dtype=built.dtype)
    (got,) = torch.autograd.grad((weights * probe).sum(), leaf)
    case.finite(got, "the gradient of a saturated or masked row is NaN or infinite")
    along = scores.movedim(dim, -1)
    exact, wide = softmax_oracle(along).movedim(-1, dim).cpu(), probe.double().cpu()
    # p, p g and their sum each carry the error of p; two products and a sum over S follow
    bound = (
        4 * softmax_bound(along, built.dtype).amax() + rounding_bound(built.dtype, scores.shape[dim], operations=3)
    ) * wide.abs().amax()
    case.close(
        got,
        _projected(exact, wide, dim).to(got.device),
        otherwise,
        bound=float(bound),
        cause=lambda: _other_axis(got.double().cpu(), exact, wide, dim),
    )


def _projected(p: Tensor, g: Tensor, dim: int) -> Tensor:
    return p * (g - (p * g).sum(dim=dim, keepdim=True))


def _other_axis(got: Tensor, p: Tensor, g: Tensor, dim: int) -> str | None:
    """Name the axis over which the inner product runs, where it is not that of the softmax."""
    for other in range(p.ndim):
        if other != dim % p.ndim and float((got - _projected(p, g, other)).abs().max()) < 1e-4 * size_of(g):
            return f"in the backward it sums output times gradient over axis {other}, not over axis {dim % p.ndim}"
    return None

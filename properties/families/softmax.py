"""Softmax: weights that are positive, sum to one, and survive extreme scores."""

from __future__ import annotations

import torch
from torch import Tensor

from veriformer.properties.bench.guards import SubjectError
from veriformer.properties.bench.measured import judged_dtypes
from veriformer.properties.bench.pool import Built
from veriformer.properties.definitions.attention import log_sum_exp_bound, softmax_bound, softmax_oracle, underflow
from veriformer.properties.definitions.rounding import epsilon, rounding_bound
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.premises import excludes_fact, needs_part
from veriformer.properties.engine.property import holds
from veriformer.properties.families.softmax_axes import permuted_axes, softmaxed
from veriformer.properties.families.softmax_fillers import (
    filled_cause,
    maximum_of_zero,
    other_maximum_cause,
    streamed_rows_cause,
)
from veriformer.properties.families.softmax_rows import one_maximum_for_all
from veriformer.properties.families.softmax_sinks import sinks_are_one_number
from veriformer.properties.subject.inputs import ordinary
from veriformer.properties.subject.subject import Subject

_DEFINITION = "Course notes, lecture 8, definition of softmax."
_WEIGHTED = ("self_attention", "cross_attention")
_NO_SINK = excludes_fact("sink")


def _weights_offered(subject: Subject) -> str | None:
    return None if subject.kind == "softmax" else needs_part("weights")(subject)


def _weights(case: Case, built: Built) -> tuple[Tensor, float]:
    """Return rows of weights `[..., S]`: of the softmax itself, or attention weights that the subject gives away.

    And by how much a row may miss one where the logarithm of the sum is subtracted and rounded at the scores' size.
    """
    if case.subject.kind == "softmax":
        shape = (case.integer("B", 1, 3), case.integer("T", 1, 5), case.integer("S", 1, 9))
        scores = case.normal(*shape, dtype=built.dtype, scale=case.choice("scale", (1.0, 10.0)))
        return softmaxed(case, built, scores), float(log_sum_exp_bound(scores, built.dtype).sum(-1).amax())
    inputs = ordinary(case.subject, built.config, case.generator, built.dtype)
    tensors = [x.to(case.bench.device) for x in inputs.tensors]
    return case.bench.call(case.subject.weights, built.module, *tensors), 0.0


@holds(
    "softmax.simplex",
    statement="Weights are not negative and every row sums to one.",
    formula="w_ij >= 0, sum_j w_ij = 1",
    source=_DEFINITION,
    kinds=("softmax", *_WEIGHTED),
    unless=_weights_offered,
    catches=("SM01", "SM02", "SM07", "CM13"),
)
def rows_lie_on_the_simplex(case: Case) -> None:
    """Exponentials are positive and are divided by their sum. In eval mode: weights returned in train mode include
    dropout. With a declared sink the sum is at most one.
    """
    built = case.built()
    weights, rounded = _weights(case, built)
    weights = weights.detach()
    sums = weights.double().sum(dim=-1)
    case.require((weights >= 0).all(), "a weight is negative", got=f"{float(weights.min()):.3g}", expected=">= 0")
    # every weight is rounded once (u each, adding to u), the sum before the division over S terms once more
    bound = max(2 * rounding_bound(built.dtype, weights.shape[-1]), rounded)
    if case.subject.fact("sink"):
        case.require((sums <= 1 + bound).all(), "a row sums to more than one", got=f"{float(sums.max()):.6g}")
        if case.subject.kind == "softmax":
            sinks_are_one_number(case, built)
    else:
        case.close(
            sums,
            torch.ones_like(sums),
            "a row of weights does not sum to one",
            bound=bound,
            constants_allowed=True,
            cause=lambda: filled_cause(case, built) or streamed_rows_cause(case, built) or _sum_cause(weights),
        )
    case.witness()


def _sum_cause(weights: Tensor) -> str | None:
    """Find the axes over which the weights do sum to one."""
    wide = weights.double()
    near = 1e-3  # far above rounding in any dtype, far below what a wrong axis gives
    for dim, name in ((-2, "the query axis"), (0, "the batch axis"), (1, "the second axis")):
        if wide.ndim > abs(dim) and wide.shape[dim] > 1 and bool(((wide.sum(dim=dim) - 1).abs() < near).all()):
            return f"the weights sum to one over {name} instead of the keys"
    if wide.ndim == 4 and bool(((wide.sum(dim=(1, 3)) - 1).abs() < near).all()):
        return "the weights sum to one over heads and keys together"
    sums = wide.sum(dim=-1)
    if sums.numel() > 1 and bool(((sums - sums.flatten()[0]).abs() < near).all()) and bool((wide >= 0).all()):
        return f"every row sums to {float(sums.flatten()[0]):.6g}: a factor is applied after the softmax"
    if bool((wide < 0).any()):
        return "some weights are negative: these are scores, or what is left of them without an exponential"
    if bool(((sums > 0) & (sums < 1 - near)).all()):
        return "the rows sum to less than one, each to another sum: a sink (declare sink=True if that is meant)"
    return None


@holds(
    "softmax.shift-invariance",
    statement="Adding one constant to all scores changes nothing.",
    formula="softmax(x + c) = softmax(x)",
    source="Course notes, lecture 8, proposition 1.1.",
    kinds=("softmax",),
    unless=_NO_SINK,
    catches=("SM08",),
)
def a_common_shift_cancels(case: Case) -> None:
    """exp(x + c) = exp(x) exp(c), and exp(c) cancels. Scores lie on a grid that x + c does not leave, so that the
    shifted scores are exact: c is up to 10^4 in float32 and float64, 10^3 in half precision. Where the maximum is not
    subtracted but the logarithm of the sum, that one is rounded at the size of c (`log_sum_exp_bound`).
    """
    built = case.built()
    largest, step = (1000, 8.0) if epsilon(built.dtype) > 1e-6 else (10_000, 1 / 256)
    shift = case.integer("shift / 8", -largest // 8, largest // 8) * 8
    shape = (case.integer("B", 1, 3), case.integer("S", 2, 9))
    grid = torch.randint(-8, 9, shape, generator=case.generator).to(case.bench.device)
    scores = grid.to(built.dtype) * step * case.choice("spread", (1, 4, 32) if step < 1 else (1,))
    case.close(
        softmaxed(case, built, scores + shift),
        softmaxed(case, built, scores),
        f"adding {shift} to all scores changes the weights",
        bound=log_sum_exp_bound(scores + shift, built.dtype) + log_sum_exp_bound(scores, built.dtype),
        constants_allowed=True,
        cause=lambda: maximum_of_zero(case, built),
    )
    if shift and bool((scores != scores[:, :1]).any()):
        case.witness()


@holds(
    "softmax.no-overflow",
    statement="Extreme scores give finite weights, equal to the float64 result.",
    formula="|softmax(x)| < inf for |x| up to the largest finite number",
    source="Course notes, lecture 8, proposition 1.1 (subtracting the maximum).",
    kinds=("softmax",),
    unless=_NO_SINK,
    catches=("SM05", "SM08"),
)
def extreme_scores_stay_finite(case: Case) -> None:
    """After the maximum is subtracted every exponent is at most 0. Rows hold +-10^4, the largest finite number of
    the dtype, both, all large, all very negative.
    """
    built = case.built()
    width = case.integer("S", 2, 9)
    top = float(torch.finfo(built.dtype).max)
    large = min(1e4, top / 2)
    scores = case.normal(6, width, dtype=built.dtype)
    scores[0, 0], scores[1, 0] = large, -large
    scores[2, 0], scores[3, 0] = top, -top
    scores[4] = large
    scores[5] = -large
    scores[4, 0], scores[5, 0] = large * 0.5, -large * 0.5
    got = softmaxed(case, built, scores)
    told = "extreme scores give NaN or infinity: the maximum is not subtracted"
    case.finite(got, told, cause=lambda: one_maximum_for_all(case, built) or maximum_of_zero(case, built))
    case.close(
        got,
        softmax_oracle(scores).to(got.device),
        "extreme scores give other weights than in float64",
        bound=log_sum_exp_bound(scores, built.dtype),
        cause=lambda: one_maximum_for_all(case, built) or maximum_of_zero(case, built) or _slip(case, built),
    )
    case.witness()


@holds(
    "softmax.masked-is-zero",
    statement="A score of -inf gets weight exactly 0, the others the softmax of what remains.",
    formula="x_j = -inf  =>  w_j = 0, w_rest = softmax(x_rest)",
    source="Course notes, section 6.1: exp(-inf) = 0.",
    kinds=("softmax",),
    unless=_NO_SINK,
    catches=("PM04", "PM07"),
)
def masked_scores_get_no_weight(case: Case) -> None:
    """exp(-inf) is 0. The smallest finite number of the dtype underflows to the same 0 beside ordinary scores; a row of
    it throughout must stay finite; its double is -inf.
    """
    built = case.built()
    width = case.integer("S", 2, 9)
    scores = case.normal(3, width, dtype=built.dtype)
    masked = torch.rand(3, width, generator=case.generator).to(scores.device) < 0.5
    masked[:, case.integer("kept", 0, width - 1)] = False
    masked[0, (case.choices["kept"] + 1) % width] = True
    least = torch.tensor(torch.finfo(built.dtype).min, dtype=built.dtype)
    for name, value in (("-inf", -torch.inf), ("the smallest finite number", least), ("twice that", least + least)):
        filled = scores.masked_fill(masked, value)
        got = softmaxed(case, built, filled)
        words = f"a score of {name} gets a weight other than 0"
        if name == "-inf":
            case.exact(got[masked], torch.zeros_like(got[masked]), words)
        elif bool(masked.any()):
            leaks = got[masked].abs().amax()
            case.require(leaks <= underflow(built.dtype), words, got=f"{float(leaks):.3g}", expected="0")
        rest = scores.masked_fill(masked, -torch.inf)
        exact = softmax_oracle(rest).to(got.device)
        case.close(
            got,
            exact,
            f"beside scores of {name} the others do not get the softmax of what remains",
            bound=softmax_bound(rest, built.dtype),
            constants_allowed=True,
        )
    everything = torch.full((1, width), float(least), dtype=built.dtype, device=scores.device)
    case.finite(softmaxed(case, built, everything), "a row of the smallest finite number gives NaN")
    case.witness()


@holds(
    "softmax.axis",
    statement="Softmax acts along its axis alone.",
    formula="softmax(P x) = P softmax(x) along the axis; slices of other axes do not influence one another",
    source=_DEFINITION,
    kinds=("softmax",),
    catches=("SM01",),
)
def other_axes_are_independent(case: Case) -> None:
    """The sum runs over one axis. All axes are tried, of three different sizes, so that a wrong one cannot hide;
    a subject that takes no axis works on the last.
    """
    built = case.built()
    sizes = (2, 3, case.integer("S", 4, 7))
    dim = case.choice("dim", (-1, 0, 1, 2) if case.subject.accepts("dim") else (-1,))
    x = case.normal(*sizes, dtype=built.dtype, scale=2.0)
    got = softmaxed(case, built, x, dim)
    slices = x.movedim(dim, -1)
    exact = _each_alone(case, built, slices) if case.subject.fact("sink") else softmax_oracle(slices)
    exact = exact.movedim(-1, dim)
    bound = softmax_bound(slices, built.dtype).movedim(-1, dim)
    case.close(
        got,
        exact.to(got.device),
        f"softmax along axis {dim} is not the softmax of each slice along it",
        bound=bound,
        cause=lambda: _axis_cause(got, x, dim) or other_maximum_cause(case, built),
    )
    order = case.permutation("order", x.shape[dim])
    moved = torch.index_select(x, dim, torch.tensor(order, device=x.device))
    case.close(
        softmaxed(case, built, moved, dim),
        torch.index_select(got, dim, torch.tensor(order, device=x.device)),
        "permuting along the axis does not permute the weights",
        bound=2 * bound.amax(),
    )
    case.witness()


def _each_alone(case: Case, built: Built, x: Tensor) -> Tensor:
    """Return what the subject makes of each slice `[S]` by itself: with a sink that is no plain softmax."""
    rows = [softmaxed(case, built, row[None, None].contiguous(), -1) for row in x.flatten(0, 1)]
    return torch.cat(rows).view(x.shape)


def _slip(case: Case, built: Built) -> str | None:
    """Try the usual slips on small scores, where nothing overflows."""
    x = torch.linspace(-1, 1, 5, dtype=built.dtype)[None]
    got = softmaxed(case, built, x).double()
    for words, value in (
        ("it is the softmax of the softmax", x.double().softmax(-1).softmax(-1)),
        ("the scores come back: they are no weights at all", x.double()),
        ("it is the logarithm of the softmax", x.double().log_softmax(-1)),
    ):
        if float((got - value).abs().max()) < 1e-2:
            return words
    return None


def _axis_cause(got: Tensor, x: Tensor, dim: int) -> str | None:
    for other in range(x.ndim):
        if other != dim % x.ndim and bool(torch.isclose(x.double().softmax(other), got.double(), atol=1e-3).all()):
            return f"the output is the softmax along axis {other}"
    return permuted_axes(got, x, dim)


@holds(
    "softmax.order",
    statement="Softmax preserves order, and its temperature runs from the argmax to the uniform distribution.",
    formula="x_i > x_j => w_i >= w_j; x_i = x_j => w_i = w_j; softmax(x / t) -> one-hot (t -> 0), 1/S (t -> inf)",
    source="Course notes, chapter 10, section 2.3 (hard attention is the limit).",
    kinds=("softmax",),
    level="extended",
    unless=_NO_SINK,
    catches=("SM01",),
)
def order_is_preserved(case: Case) -> None:
    """Exp increases. Scores are drawn with ties; gaps of 1 times 10^4 leave nothing to the second best."""
    built = case.built()
    width = case.integer("S", 3, 9)
    scores = torch.randint(-2, 3, (4, width), generator=case.generator).to(case.bench.device, built.dtype)
    scores[:, 0] = scores[:, 1]
    got = softmaxed(case, built, scores)
    bound = softmax_bound(scores, built.dtype)
    case.close(
        got[:, 0], got[:, 1], "equal scores get different weights", bound=2 * bound[:, 0], constants_allowed=True
    )
    better = scores[:, :, None] > scores[:, None, :]
    drop = (got[:, None, :] - got[:, :, None])[better]
    case.require(
        (drop <= 0).all(),
        "a higher score gets a lower weight",
        got=f"{float(drop.amax()) if drop.numel() else 0:.3g}",
    )
    scores[:, 2] = 9
    hard = softmaxed(case, built, scores * 1000)
    case.close(
        hard[:, 2],
        torch.ones_like(hard[:, 2]),
        "at low temperature the best score does not get all weight",
        bound=4 * epsilon(built.dtype),
        constants_allowed=True,
    )
    flat = softmaxed(case, built, scores * 1e-4)
    # |x| <= 9e-4 moves exp by at most 1e-3, so each weight lies within 2e-3 / S of uniform
    case.close(
        flat,
        torch.full_like(flat, 1 / width),
        "at high temperature the weights are not uniform",
        bound=2e-3 / width + 4 * epsilon(built.dtype),
        constants_allowed=True,
    )
    case.witness()


_DTYPES = ("float32", "float16", "bfloat16")


@holds(
    "softmax.accuracy",
    statement="The error against float64 stays within the rounding bound for long rows in every dtype.",
    formula="|w - w_float64| <= w ((|x - max| + 4) eps + gamma_S(float32))",
    source="Higham 2002, section 3.1; derivation in softmax_bound.",
    kinds=("softmax",),
    level="extended",
    unless=_NO_SINK,
    catches=("SM04", "SM05"),
)
def long_rows_are_accurate_in_every_dtype(case: Case) -> None:
    """Rows of up to 4096 equal or ordinary scores: a running sum in half precision stops growing at 2048."""
    name = case.choice("format", _DTYPES)
    if case.bench.settings.dtypes:
        name = str(case.bench.settings.dtypes[0]).removeprefix("torch.")
    dtype = getattr(torch, name)
    built = case.built(dtype=judged_dtypes(case.bench)[0])
    width = case.choice("S", (4096, 3000, 2049, 257, 1))
    scores = case.normal(2, width, dtype=dtype)
    scores[1] = 0.5
    try:
        got = softmaxed(case, built, scores)
    except SubjectError:
        case.reject(f"the subject does not take {name}")
    asks = ("half_precision", False) if dtype.itemsize < 4 else None
    if asks and case.subject.fact("half_precision") is False:
        case.reject("it is not meant for half precision")
    exact = softmax_oracle(scores)
    case.close(
        got,
        exact.to(got.device),
        f"a row of {width} scores in {name} is less accurate than rounding explains",
        asks=asks,
        bound=softmax_bound(scores, dtype),
        constants_allowed=True,
        cause=lambda: streamed_rows_cause(case, built),
    )
    sums = got.double().sum(dim=-1)
    limit = epsilon(dtype) + 2 * rounding_bound(torch.float32, width)
    case.close(
        sums,
        torch.ones_like(sums),
        f"a row of {width} weights in {name} does not sum to one",
        asks=asks,
        bound=limit,
        constants_allowed=True,
        cause=lambda: streamed_rows_cause(case, built),
    )
    case.witness()

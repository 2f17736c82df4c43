"""Normalization: the formula at every scale, each token by itself, no overflow, no surprise at a constant input."""

from __future__ import annotations

import torch
from torch import Tensor

from veriformer.properties.bench.guards import SubjectError
from veriformer.properties.bench.measured import judged_dtypes
from veriformer.properties.bench.pool import Built
from veriformer.properties.causes.structure import off_the_record
from veriformer.properties.definitions.differences import size_of
from veriformer.properties.definitions.rounding import epsilon, rounding_bound
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.premises import excludes_fact, needs_fact, needs_module, needs_part
from veriformer.properties.engine.property import holds
from veriformer.properties.families.norm_rows import at_width, every_block_of_channels_counts, sums_do_not_stick
from veriformer.properties.families.norm_variances import definition_cause, used_factor, used_variance
from veriformer.properties.families.row_gradients import gradients_add_up
from veriformer.properties.probes.norms import is_centred, read_off

_KIND = ("norm",)
_KNOWN = excludes_fact("norm", "none", "other")
_BA = "Ba et al. 2016, equation 4; Zhang & Sennrich 2019, equation 4."
_HALF = (torch.float16, torch.bfloat16)


def _input(case: Case, built: Built, scale: float = 1.0, offset: float = 0.0, tokens: int = 3) -> Tensor:
    """Return `[2, tokens, D]` of a standard deviation and a mean, in units of that deviation."""
    x = case.normal(2, tokens, built.config.d_model, dtype=torch.float64)
    return ((x + offset) * scale).to(built.dtype)


_UNBIASED = "the variance is divided by d - 1 instead of d (declare norm='other' if that is meant)"


@holds(
    "norm.definition",
    statement="The output is gain * (x - mean) / sqrt(variance + eps) + bias, at every scale and offset.",
    formula="y = g (x - m) / sqrt(v + eps) + b; v biased, over channels; RMSNorm: m = 0",
    source=_BA,
    kinds=_KIND,
    unless=_KNOWN,
    catches=("NM01", "NM02", "NM04"),
)
def the_formula_holds_at_every_scale(case: Case) -> None:
    """Gain, bias and eps are read off the answers at two scales; the formula must then give the answers at all others.
    With an offset of r standard deviations, subtracting the mean rounds to r units of the last place; a variance from
    E[x^2] - E[x]^2 would err by r^2 of them. Then for widths of 1 to 8192, with one block of channels far off.
    """
    built = case.built()
    model = read_off(case, built)
    narrow = built.dtype in _HALF
    scale = case.choice("scale", (1.0, 100.0) if narrow else (1.0, 1e-5, 1e-3, 1e-2, 100.0, 1e4))
    offset = case.choice("offset", (0.0, 4.0) if narrow else (0.0, 4.0, 100.0, 1000.0, 1e4))
    x = _input(case, built, scale, offset)
    expected = model(x)
    rounding = rounding_bound(built.dtype, x.shape[-1], operations=3)
    gain = float(model.gain.abs().max())
    # eps was measured to some 16 roundings; it weighs at most a half
    bound = gain * (rounding * (2 + 2 * offset) + 16 * epsilon(built.dtype)) * 4 + rounding * size_of(expected)
    case.close(
        case.call(built, x).double(),
        expected,
        "the output is not that of the formula",
        bound=bound,
        cause=lambda: definition_cause(case, built, model, x, bound),
    )
    if not narrow:
        every_block_of_channels_counts(case, built, model.centred)
    case.witness()


def _ordinary(shape: torch.Size, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@holds(
    "norm.statistics",
    statement="With gain 1 and bias 0 every token has mean 0 and variance 1 (RMSNorm: mean square 1).",
    formula="g = 1, b = 0  =>  mean y = 0, mean y^2 = 1",
    source=_BA,
    kinds=_KIND,
    unless=(_KNOWN, needs_part("build")),
    catches=("NM01",),
)
def tokens_have_unit_variance(case: Case) -> None:
    """As built, gains are one and biases zero. At a scale of 100 an eps of up to 1e-3 takes 1e-7 of the variance."""
    built = case.built(raw=True)
    scale = 100.0
    y = case.call(built, _input(case, built, scale, case.choice("offset", (0.0, 2.0)))).detach().double()
    limit = 8 * rounding_bound(built.dtype, y.shape[-1], operations=3) + 1e-3 / scale**2
    if is_centred(case, built):
        case.close(
            y.mean(dim=-1),
            torch.zeros(y.shape[:-1], dtype=torch.float64, device=y.device),
            "the mean over the channels of a token is not 0",
            bound=3 * limit,
            constants_allowed=True,
        )
    square = y.square().mean(dim=-1)
    case.close(
        square,
        torch.ones_like(square),
        "the mean square over the channels of a token is not 1",
        bound=limit,
        constants_allowed=True,
        cause=lambda: (
            _variance_cause(square, y.shape[-1], limit)
            or _doubled(square, built, limit)
            or used_variance(case)
            or used_factor(case)
        ),
    )
    case.witness()


def _variance_cause(square: Tensor, width: int, limit: float) -> str | None:
    known = (
        ((width - 1) / width, _UNBIASED),
        (1 / width, "tokens are divided by the root of the sum of squares, not of their mean: sqrt(D) is missing"),
        (float(width), "tokens are multiplied by sqrt(D) once more than the formula has it"),
    )
    return next((words for value, words in known if float((square / value - 1).abs().max()) <= limit), None)


def _doubled(square: Tensor, built: Built, limit: float) -> str | None:
    """Say that a gain of 1 + weight begins at 2."""
    ones = [name for name, p in built.module.named_parameters() if bool((p == 1).all())] if built.module else []
    if not ones or float((square / 4 - 1).abs().max()) > limit:
        return None
    return (
        f"outputs are twice what they should be as built: the gain that acts is 1 + {ones[0]}, and {ones[0]} begins at "
        "1 where it must begin at 0"
    )


@holds(
    "norm.per-token",
    statement="Each token is normalised by itself; other tokens and samples have no influence.",
    formula="f(x)_bt depends on x_bt alone",
    source="Ba et al. 2016, section 3: the same computation at training and test time, for one sample.",
    kinds=_KIND,
    catches=("NM03",),
)
def each_token_by_itself(case: Case) -> None:
    """Statistics over the batch or over time would leak between samples, and from the future. The gradients of gain and
    bias add up over the tokens, however many there are.
    """
    built = case.built()
    x = _input(case, built)
    before = case.call(built, x)
    row, token = case.integer("b", 0, 1), case.integer("t", 0, x.shape[1] - 1)
    changed = x.clone()
    changed[row, token] = 3 * case.normal(x.shape[-1], dtype=x.dtype) + 5
    same = (changed == x).all(dim=-1)
    after = case.call(built, changed)
    case.close(after[same], before[same], "a token's output changed when another token was replaced",
               cause=lambda: _mixed(same, before, after, row))  # fmt: skip
    case.differs(after[~same], before[~same], "a token that was replaced by another kept its output")
    gradients_add_up(case, built)
    case.witness()


def _mixed(same: Tensor, before: Tensor, after: Tensor, row: int) -> str:
    moved = ((after - before).abs().amax(dim=-1) > 0) & same
    return "the statistics run over the batch" if bool(moved[1 - row].any()) else "the statistics run over time"


@holds(
    "norm.scale-invariance",
    statement="A token times a positive number gives the same output.",
    formula="f(a x) = f(x), a > 0",
    source="m and sqrt(v) are homogeneous of degree one; Ba et al. 2016, table 1.",
    kinds=_KIND,
    unless=_KNOWN,
)
def a_factor_changes_nothing(case: Case) -> None:
    """Far above eps: at a scale of 2^13 (2^6 in half precision) an eps of 1e-3 changes 1e-11 (1e-7). Powers of two are
    exact, so that the input itself does not round.
    """
    built = case.built()
    base = 2.0**6 if built.dtype in _HALF else 2.0**13
    x = _input(case, built, base, case.choice("offset", (0.0, 1.0)))
    factor = case.choice("a", (2.0, 0.5, 8.0))
    expected = case.call(built, x)
    bound = size_of(expected) * (case.tolerance(built) + 4 * 1e-3 / base**2)
    case.close(case.call(built, factor * x), expected, f"x times {factor} gives another output", bound=bound)
    case.witness()


@holds(
    "norm.shift-invariance",
    statement="LayerNorm: a constant added to all channels of a token changes nothing.",
    formula="f(x + c 1) = f(x)",
    source="x - mean(x) is free of c; RMSNorm keeps the mean (Zhang & Sennrich 2019, section 3).",
    kinds=_KIND,
    level="extended",
    unless=needs_fact("norm", "layer", "rms"),
)
def a_constant_changes_nothing(case: Case) -> None:
    """The sum x + c rounds to the last place of c, so c is a few standard deviations. For RMSNorm the other side holds:
    the constant matters.
    """
    built = case.built()
    x = _input(case, built)
    constant = case.choice("c", (2.0, -4.0, 8.0))
    expected, got = case.call(built, x), case.call(built, x + constant)
    if case.subject.fact("norm") == "rms":
        case.differs(got, expected, "RMSNorm does not subtract the mean, yet a constant changes nothing")
    else:
        gain = size_of(expected)
        bound = gain * rounding_bound(built.dtype, x.shape[-1], operations=4) * (1 + abs(constant)) * 4
        case.close(got, expected, f"adding {constant} to all channels of a token changes its output",
                   bound=max(bound, gain * case.tolerance(built)))  # fmt: skip
    case.witness()


@holds(
    "norm.constant-input",
    statement="A token whose channels are all equal gives a finite output and a finite gradient; zeros give the bias.",
    formula="f(0) = b; f(c 1), grad f(c 1) finite",
    source="eps > 0 keeps sqrt(v + eps) away from 0.",
    kinds=_KIND,
    unless=_KNOWN,
    catches=("NM14",),
)
def a_constant_token_is_finite(case: Case) -> None:
    """Padding embeddings are zeros, so such tokens occur. Without eps, or with one that underflows, 0 / 0 is NaN."""
    built = case.built()
    value = case.choice("c", (0.0, 1.0, -3.5))
    x = torch.full((1, 2, built.config.d_model), value, dtype=built.dtype, device=case.bench.device)
    if built.module is not None:
        x.requires_grad_()
    y = case.call(built, x)
    case.finite(y, f"a token of channels {value} gives NaN or infinity")
    if y.requires_grad and x.requires_grad:
        (gradient,) = torch.autograd.grad(y.float().sum(), x)
        case.finite(gradient, f"the gradient at a token of channels {value} is NaN or infinite")
    if value == 0:
        z = _input(case, built, 1.0)[:1]
        bias = (case.call(built, z) + case.call(built, -z)).detach()[0, 0] / 2
        limit = size_of(case.call(built, z)) * 4 * max(case.tolerance(built), epsilon(built.dtype))
        case.close(
            y.detach()[0, 0], bias, "a token of zeros does not give the bias", bound=limit, constants_allowed=True
        )
    case.witness()


@holds(
    "norm.half-precision",
    statement="Large float16 inputs do not overflow inside, and sums over wide tokens do not stick in half precision.",
    formula="|x| <= 6e4 in float16  =>  |f(x)| < inf and f(x) = f(x / 2^8)",
    source="6e4 squared is 3.6e9, beyond float16's 65504: the mean square needs float32 (Zhang & Sennrich code, T5).",
    kinds=_KIND,
    level="extended",
    unless=(_KNOWN, needs_module, excludes_fact("half_precision", False)),
    asks=("half_precision", False),
    catches=("NM12",),
)
def float16_does_not_overflow(case: Case) -> None:
    """A layer that refuses float16 with an error is right too. The formula as textbooks write it, in the dtype of its
    input, overflows at a mean square of 6e4: activations of released models reach that, so whoever did not say for
    which numbers the layer is meant is asked.
    """
    sums_do_not_stick(case)
    _does_not_overflow(case, case.built(dtype=torch.float16))
    wide = at_width(case, torch.float16, 1025)  # where sums are kept block by block
    if wide is not None:
        _does_not_overflow(case, wide)
    case.witness()


def _does_not_overflow(case: Case, built: Built) -> None:
    x = _input(case, built, 1.0).sign() * case.choice("size", (2.0**9, 6e4))
    x = x * (1 - 0.25 * _input(case, built, 1.0).abs().clamp(max=1))
    try:
        got, expected = case.call(built, x), case.call(built, x / 2**8)
    except SubjectError:
        return
    case.finite(got, "a float16 input gives NaN or infinity")
    # both round to eleven bits; eps of 1e-5 is far below (2^1)^2
    case.close(got, expected, "x and x / 256 give different outputs in float16",
               bound=size_of(expected) * 0.02, cause=lambda: _overflow(case, built))  # fmt: skip


def _overflow(case: Case, built: Built) -> str | None:
    """Halve the input until the answer is that of small ones: where squares reach 65504, or their sum does."""
    width = built.config.d_model
    x = _ordinary(torch.Size((1, 1, width)), width).sign().to(case.bench.device, built.dtype)
    x = x * torch.linspace(0.8, 1.0, width, dtype=built.dtype, device=x.device)
    with off_the_record(case):
        right = case.call(built, x * 8).detach().double()
        sizes = [2.0**power for power in range(4, 16)]
        wrong = []
        for size in sizes:
            got = case.call(built, x * size).detach().double()
            if float((got - right).abs().max()) > 0.02 * float(right.abs().max()):
                wrong.append((size, float(got.abs().max())))
    if not wrong or [size for size, _ in wrong] != sizes[-len(wrong) :]:
        return None
    first, largest = wrong[0]
    squares = (x.double() * first).square()
    small = squares / 4  # at the last size that is right
    reached = (
        ("the sum of squares exceeds", squares.sum(), small.sum()),
        ("squares exceed", squares.amax(), small.amax()),
        ("the mean of the squares, rounded to float16 before eps and the root, exceeds", squares.mean(), small.mean()),
    )
    what = next((words for words, now, before in reached if bool(now > _LARGEST_HALF > before)), None)
    if what is None:
        return None
    gives = (
        "0" if largest < 1e-3 else "infinity" if largest == torch.inf else "NaN" if largest != largest else "another"
    )
    return (
        f"right for inputs up to {first / 2:g} and wrong from {first:g} on, where {what} "
        f"65504, the largest float16, and the output is {gives}: the mean square must be computed in float32"
    )


_LARGEST_HALF = 65504.0


@holds(
    "norm.jacobian",
    statement="Moving a token along itself (LayerNorm: its centred self, or along 1) changes nothing to first order.",
    formula="J (x - m) = 0, J 1 = 0; |J| ~ 1 / |x|",
    source="Derivative of the scale and shift invariance; |J| = O(sqrt(d) / |x|), Xiong et al. 2020, lemma 4.",
    kinds=_KIND,
    level="extended",
    unless=(_KNOWN, needs_module),
)
def the_gradient_is_orthogonal_to_the_input(case: Case) -> None:
    """Checked on a random cotangent, relative to the size of the gradient, far above eps; and ten times the input has a
    tenth of the gradient.
    """
    built = case.built(dtype=judged_dtypes(case.bench)[-1])
    base = 2.0**6 if built.dtype in _HALF else 2.0**10
    x = _input(case, built, base).requires_grad_()
    weight = case.normal(*x.shape, dtype=built.dtype)
    (gradient,) = torch.autograd.grad((case.call(built, x) * weight).sum(), x)
    wide, g = x.detach().double(), gradient.double()
    centred = is_centred(case, built)
    direction = wide - wide.mean(dim=-1, keepdim=True) if centred else wide
    # a sum of D products, each of which carries a few roundings; and eps / v of the direction itself
    limit = 16 * rounding_bound(built.dtype, x.shape[-1], operations=4) + 1e-3 / base**2 * 4
    for along, words in (
        (direction, "its own deviation"),
        *(((torch.ones_like(wide), "all ones"),) if centred else ()),
    ):
        product = (g * along).sum(dim=-1) / (g.norm(dim=-1) * along.norm(dim=-1)).clamp(min=1e-300)
        case.close(product, torch.zeros_like(product), f"the gradient has a part along {words}", bound=limit,
                   constants_allowed=True)  # fmt: skip
    large = (2 * x.detach()).requires_grad_()
    (halved,) = torch.autograd.grad((case.call(built, large) * weight).sum(), large)
    case.close(2 * halved.double(), g, "twice the input does not have half of the gradient",
               bound=limit * size_of(g) * 4)  # fmt: skip
    case.witness()


@holds(
    "norm.no-inplace",
    statement="The caller's tensor is left as it is, in every dtype.",
    formula="x before f(x) = x after f(x)",
    source="A cast makes a copy in one dtype and none in another, so an in-place step shows in some dtypes only.",
    kinds=_KIND,
)
def the_input_is_left_alone(case: Case) -> None:
    """A layer that refuses a dtype with an error is right too."""
    dtype = getattr(torch, case.choice("given", ("float32", "float64", "bfloat16", "float16")))
    built = case.built(dtype=dtype)
    x = _input(case, built)
    kept = x.clone()
    try:
        case.call(built, x)
    except SubjectError:
        case.witness()
        return
    case.require(
        (x == kept).all(), "the call changed the caller's tensor", got="altered entries", expected="x as given"
    )
    case.witness()

"""Wrong formulas of normalization, and which of them gives an output."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

Call = Callable[[Tensor], Tensor]


def _formulas(x: Tensor, centred: bool, eps: float) -> Iterator[tuple[str, Tensor]]:
    """Yield normalised tokens in float64; no words for what is right."""
    mean = x.mean(-1, keepdim=True)
    centre, width = x - mean, x.shape[-1]
    variance, square = centre.square().mean(-1, keepdim=True), x.square().mean(-1, keepdim=True)
    if centred:
        yield "", centre / (variance + eps).sqrt()
        yield "the mean over the channels is not subtracted: it is RMSNorm, not LayerNorm", x / (square + eps).sqrt()
        yield (
            "the mean is subtracted above the line alone: below stands the mean square",
            centre / (square + eps).sqrt(),
        )
        yield "the mean is subtracted in the variance alone, and not above the line", x / (variance + eps).sqrt()
    else:
        yield "", x / (square + eps).sqrt()
        yield "the mean is subtracted: it is LayerNorm, not RMSNorm", centre / (variance + eps).sqrt()
        yield "the variance stands in place of the mean square", x / (variance + eps).sqrt()
    above, below = (centre, variance) if centred else (x, square)
    unbiased = below * width / (width - 1)
    yield (
        "the variance is divided by d - 1 instead of d (declare norm='other' if that is meant)",
        above / (unbiased + eps).sqrt(),
    )
    yield "it is divided by the variance, not by its root", above / (below + eps)
    yield "it is multiplied by the root, not divided by it", above * (below + eps).sqrt()
    yield (
        "the mean of absolute values stands in place of the root of the mean square",
        above / (above.abs().mean(-1, keepdim=True) + eps),
    )
    yield (
        "the largest absolute value stands in place of the root of the mean square",
        above / (above.abs().amax(-1, keepdim=True) + eps),
    )
    yield "it is not divided at all: only the mean is subtracted", centre
    yield "the sum of squares stands in place of their mean", above / (below * width + eps).sqrt()
    for name, axes in (
        ("time", (1,)),
        ("the batch", (0,)),
        ("time and channels together", (1, 2)),
        ("the whole batch", (0, 1, 2)),
    ):
        middle = x.mean(axes, keepdim=True)
        off = x - middle if centred else x
        yield f"the statistics run over {name}", off / (off.square().mean(axes, keepdim=True) + eps).sqrt()
    for name, dtype in (("float16", torch.float16), ("bfloat16", torch.bfloat16)):
        low = x.to(dtype)
        low_mean = low.mean(-1, keepdim=True) if centred else torch.zeros_like(low[..., :1])
        spread = (low - low_mean).square().mean(-1, keepdim=True).double()
        yield f"the statistics are computed in {name}", (x - low_mean.double()) / (spread + eps).sqrt()


def norm_cause(
    call: Call, x: Tensor, gain: Tensor, bias: Tensor, eps: float, centred: bool, bound: float
) -> str | None:
    """Name the one wrong formula that gives the output for a token of ordinary size.

    Args:
        call: gives the outputs of the layer.
        x: `[B, T, D]` of a case that fails.
        gain: `[D]`, as it stands in the module or was read off.
        bias: `[D]`.
        eps: read off.
        centred: whether the mean is to be subtracted.
        bound: largest difference that is rounding, for `x`.
    """
    got, wide = call(x).detach().double(), x.detach().double()
    fits = []
    plain, loose = 0.0, 4 * bound
    for words, guess in _formulas(wide, centred, eps):
        error = float((got - (gain * guess + bias)).abs().max())
        plain = plain if words else error
        loose = 0.2 * plain if "computed in" in words else 4 * bound  # nearer than the right formula, and by far
        if error <= loose:
            fits.append(words)
        for told, other in (
            ("the gain is missing", guess + bias),
            ("the bias is added before the gain is multiplied", gain * (guess + bias)),
            ("the gain is multiplied twice", gain * gain * guess + bias),
            ("1 is added to the gain", (1 + gain) * guess + bias),
            ("the bias is missing", gain * guess),
        ):
            if not words and error > loose and float((got - other).abs().max()) <= 4 * bound:
                fits.append(told)
    within = next(guess for words, guess in _formulas(gain * wide, centred, eps) if not words)
    if not fits and plain > loose and float((got - (within + bias)).abs().max()) <= 4 * bound:
        return "the gain multiplies the input before it is normalised, not what is normalised"
    return fits[0] if len(set(fits)) == 1 and fits[0] else None


def eps_cause(call: Call, x: Tensor, gain: Tensor, bias: Tensor, eps: float, centred: bool) -> str | None:
    """Tell by small tokens how eps enters: inside of the root, beside it, as a floor.

    Args:
        call: gives the outputs of the layer.
        x: `[B, T, D]` of deviation one.
        gain: `[D]`.
        bias: `[D]`.
        eps: read off as if it stood inside.
        centred: whether the mean is subtracted.
    """
    inside, beside, floors = [], [], []
    for scale in (1e-2, 3e-3, 1e-3, 3e-4, 1e-4):
        token = (x * scale).detach()
        wide = token.double()
        above = wide - wide.mean(-1, keepdim=True) if centred else wide
        root = above.square().mean(-1, keepdim=True).sqrt()
        below = (above * gain / (call(token).detach().double() - bias)).median(-1, keepdim=True).values.abs()
        beside.append(below - root)
        inside.append(below.square() - root.square())
        floors.append((below, root))
    first, second = torch.stack(beside), torch.stack(inside)

    def steady(values: Tensor) -> bool:
        return bool(values.mean() > 0) and float(values.std() / values.mean()) < 0.02

    if steady(first[2:]) and not steady(second[2:]):
        return f"eps ({float(first[2:].mean()):.2g}) is added to the standard deviation, outside the root"
    lows = torch.stack([below for below, _ in floors])
    roots = torch.stack([root for _, root in floors])
    least = float(lows.min())
    if float((lows - roots.clamp(min=least)).abs().max()) < 1e-3 * least and bool((roots < 0.9 * least).any()):
        return f"the root is clamped from below at {least:.2g} instead of having eps added under it"
    if float((lows - roots).abs().max()) < 1e-3 * float(roots.min()) and eps == 0:
        return "there is no eps"
    return None


def one_pass_cause(
    call: Call, x: Tensor, gain: Tensor, bias: Tensor, eps: float, formula: Call, bound: float
) -> str | None:
    """Tell a variance by E[x^2] - E[x]^2: right without a mean, and wrong as that difference is when it cancels.

    Args:
        call: gives the outputs of the layer.
        x: `[B, T, D]` whose mean is large against its spread.
        gain: `[D]`.
        bias: `[D]`.
        eps: inside of the root.
        formula: gives what is right.
        bound: largest difference that is rounding, for `x`.
    """
    plain = x - x.mean(-1, keepdim=True)
    if float((call(plain).detach().double() - formula(plain)).abs().max()) > bound:
        return None
    mean = x.mean(-1, keepdim=True)
    one_pass = (x * x).mean(-1, keepdim=True) - mean * mean
    two_pass = (x - mean).square().mean(-1, keepdim=True)
    lost = float(((one_pass - two_pass).abs() / two_pass).max())
    got = call(x).detach()
    used = ((x - mean).double() * gain / (got.double() - bias)).square().median(-1, keepdim=True).values - eps
    off = float(((used - two_pass.double()).abs() / two_pass.double()).max()) if bool(got.isfinite().all()) else lost
    if not 0.05 * lost < off < 20 * max(lost, 0.05):
        return None
    return (
        "wrong where the mean is large against the spread: the variance is E[x^2] - E[x]^2 and cancels (in this dtype "
        f"that difference errs by {lost:.2g} of the variance here)"
    )

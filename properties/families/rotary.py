"""Rotary positions: rotations whose composition makes scores depend on distance alone."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from veriformer.properties.bench.guards import SubjectError
from veriformer.properties.bench.pool import Built
from veriformer.properties.causes.structure import off_the_record
from veriformer.properties.definitions.differences import size_of
from veriformer.properties.definitions.rounding import epsilon, rounding_bound
from veriformer.properties.diagnosis.precision import angles_in_half
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.premises import excludes_fact, needs_fact, needs_mask
from veriformer.properties.engine.property import holds
from veriformer.properties.engine.stream import SEQUENCES, Stream
from veriformer.properties.formulas.rotations import rotation_cause
from veriformer.properties.subject.paths import Path
from veriformer.properties.subject.subject import Subject

_KIND = ("rotary",)
_PAPER = "Su et al. 2021, section 3.2.2."


class _Rotating:
    """A rotary subject with a drawn model and vectors of many positions."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.built: Built = case.built()
        self.heads, self.width = self.built.config.num_heads, self.built.config.d_head
        if self.built.module is None and case.subject.config is None and case.subject.fact("rotary_dim"):
            self.width += case.choice("passing", (4, 0, 2))  # a function takes heads of any width
        self.dtype = self.built.dtype

    def vectors(self, length: int) -> Tensor:
        """Return `[1, H, T, K]` unit normal."""
        return self.case.normal(1, self.heads, length, self.width, dtype=self.dtype)

    def at(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate `x` to `positions` `[T]`."""
        return self.case.call(self.built, x, positions.to(x.device))

    def bound(self, largest: int, length: float) -> float:
        """Bound the error of a rotated vector of this length at positions up to `largest`.

        An angle p omega computed in float32 is wrong by p omega (log(base) + 3) eps; sine, cosine, two products and
        a sum add a few u of the dtype.
        """
        angle = largest * (math.log(float(self.case.subject.fact("base", 10000.0))) + 3) * epsilon(torch.float32)
        return length * (angle + 8 * epsilon(self.dtype) + 8 * epsilon(torch.float32))


def _far(case: Case) -> int:
    return int(case.choice("far", (10, 100, 1000)))


@holds(
    "rotary.isometry",
    statement="Rotating changes no norm.",
    formula="|R_p x| = |x|",
    source=_PAPER,
    kinds=_KIND,
    catches=("RP04", "RP13"),
)
def norms_are_kept(case: Case) -> None:
    """cos^2 + sin^2 = 1 in every pair of channels, whatever the pairing; channels that pass through keep theirs."""
    rotating = _Rotating(case)
    length, far = case.integer("T", 1, 9), _far(case)
    x = rotating.vectors(length)
    positions = torch.randint(0, far, (length,), generator=case.generator)
    before, after = (v.double().norm(dim=-1) for v in (x, rotating.at(x, positions)))
    # the norm of a pair is exact to rounding even where the angle is not: cos and sin share it
    bound = before * 16 * (epsilon(rotating.dtype) + epsilon(torch.float32))
    case.close(after, before, "rotating changes the norm of a vector", bound=bound, constants_allowed=True)
    case.witness()


@holds(
    "rotary.identity",
    statement="At position 0 nothing is rotated, and elsewhere something is.",
    formula="R_0 x = x, R_p x != x",
    source=_PAPER,
    kinds=_KIND,
    catches=("RP04", "RP05"),
)
def position_zero_is_the_identity(case: Case) -> None:
    """The angle is 0 for every channel and every head."""
    rotating = _Rotating(case)
    length = case.integer("T", 1, 9)
    x = rotating.vectors(length)
    got = rotating.at(x, torch.zeros(length, dtype=torch.long))
    case.close(got, x, "position 0 is not the identity", bound=float(4 * epsilon(rotating.dtype) * x.abs().amax()))
    moved = rotating.at(x, torch.arange(1, length + 1))
    for head in range(rotating.heads):
        change = (moved - x)[:, head].abs().amax()
        case.require(change > 1e-3, f"head {head} is not rotated at all", got=f"{change:.3g}", expected="a change")
    case.witness()


@holds(
    "rotary.composition",
    statement="Rotating to a and then by b is rotating to a + b.",
    formula="R_b R_a = R_{a+b}",
    source=_PAPER,
    kinds=_KIND,
    catches=("RP04", "RP11", "RP01"),
)
def rotations_compose(case: Case) -> None:
    """Angles add. Positions repeat within a call, so that an index instead of a position shows."""
    rotating = _Rotating(case)
    length, far = case.integer("T", 1, 6), _far(case)
    a, b = (torch.randint(0, far, (length,), generator=case.generator) for _ in range(2))
    x = rotating.vectors(length)
    got, expected = rotating.at(rotating.at(x, a), b), rotating.at(x, a + b)
    bound = 3 * rotating.bound(2 * far, float(x.abs().amax()) * 2)
    case.close(got, expected, "rotating twice is not rotating by the sum of the positions", bound=bound)
    case.witness()


@holds(
    "rotary.relative",
    statement="The inner product of a query at i and a key at j depends on i - j alone, and on its sign.",
    formula="<R_i q, R_j k> = <R_{i+s} q, R_{j+s} k>",
    source=_PAPER,
    kinds=_KIND,
    catches=("RP01", "RP04", "RP05", "RP11"),
)
def inner_products_see_distance(case: Case) -> None:
    """R_i^T R_j = R_{j-i}. Shifts are far (up to 1000): an angle in half precision is wrong there by whole turns. The
    sign matters: the product at distance +s is not the one at -s.
    """
    rotating = _Rotating(case)
    far = _far(case)
    distance, shift = case.integer("i - j", 1, 9), case.integer("shift", 1, far)
    q, k = rotating.vectors(8), rotating.vectors(8)  # eight pairs: one alone may happen to see no difference of sign

    def product(i: int, j: int) -> Tensor:
        left, right = rotating.at(q, torch.full((8,), i)), rotating.at(k, torch.full((8,), j))
        return (left.double() * right.double()).sum(dim=-1)

    near, moved = product(distance, 0), product(distance + shift, shift)
    size = float(q.double().norm(dim=-1).amax() * k.double().norm(dim=-1).amax())
    bound = 4 * rotating.bound(far + 10, 1.0) * size + size * rounding_bound(torch.float32, rotating.width)
    case.close(
        moved,
        near,
        f"the inner product at distance {distance} changes when both positions move by {shift}",
        bound=bound,
    )
    mirrored = product(0, distance)
    same = (near - mirrored).abs().amax()
    case.require(
        same > bound,
        "the inner product does not tell i - j from j - i",
        got=f"{same:.3g}",
        expected=f"above {bound:.3g}",
    )
    case.witness()


@holds(
    "rotary.frequencies",
    statement="The frequencies are base^(-2i/K) for i = 0 .. K/2 - 1, in some order of the channels.",
    formula="{omega_i} = {base^(-2i/K)}",
    source=_PAPER,
    kinds=_KIND,
    level="extended",
    requires=("rotary.isometry", "rotary.identity", "rotary.composition"),
    catches=("RP11", "RP13"),
)
def frequencies_are_geometric(case: Case) -> None:
    """The rotation to position 1, as a K x K matrix, has eigenvalues exp(+-i omega): independent of the pairing. With a
    declared rotary_dim the rest are 1, and that width sets the frequencies.
    """
    rotating = _Rotating(case)
    width = rotating.width
    turned = int(case.subject.fact("rotary_dim", width))
    basis = torch.eye(width, dtype=rotating.dtype, device=case.bench.device).expand(1, rotating.heads, width, width)
    matrix = rotating.at(basis.contiguous(), torch.ones(width, dtype=torch.long))[0].double().cpu()
    case.generator  # noqa: B018 - the seed is drawn, so that a replay has it
    angles = torch.linalg.eigvals(matrix).angle().abs().sort(dim=-1, descending=True).values
    base = float(case.subject.fact("base", 10000.0))
    omega = base ** (-torch.arange(0, turned, 2, dtype=torch.float64) / turned)
    expected = torch.cat([omega.repeat_interleave(2), torch.zeros(width - turned, dtype=torch.float64)])
    # an eigenvalue of a normal matrix moves by at most the norm of the perturbation
    bound = width * rotating.bound(1, 1.0)
    case.close(
        angles,
        expected.sort(descending=True).values.expand_as(angles).clone(),
        "the frequencies are not base^(-2i/K)",
        bound=bound,
        constants_allowed=True,
        asks=None if case.subject.fact("base") else _another_base(angles[0], turned, bound),
        cause=lambda: rotation_cause(case) or _frequency_cause(angles[0], turned, rotating.width, base, bound),
    )
    case.witness()


def _another_base(angles: Tensor, turned: int, bound: float) -> tuple[str, float] | None:
    """Ask whether another base is meant, where one explains every frequency: released models have many."""
    measured = angles[::2][: turned // 2]
    if turned < 4 or not 0 < float(measured[-1]) < 1:
        return None
    base = float(f"{float(measured[-1]) ** (-turned / (turned - 2)):.3g}")
    omega = base ** (-torch.arange(0, turned, 2, dtype=torch.float64) / turned)
    return ("base", base) if float((measured - omega).abs().amax()) <= bound else None


def _frequency_cause(angles: Tensor, turned: int, width: int, base: float, bound: float) -> str | None:
    measured = angles[::2][: turned // 2]
    if turned < width:
        whole = base ** (-torch.arange(0, turned, 2, dtype=torch.float64) / width)
        if float((measured - whole).abs().amax()) <= bound:
            return f"the exponents are divided by the width {width} of the head, not by the {turned} rotated channels"
    for words, exponent in (("i/K", 1.0), ("4i/K", 4.0)):
        guess = base ** (-torch.arange(turned // 2, dtype=torch.float64) * exponent / turned)
        if float((measured - guess).abs().amax()) <= bound:
            return f"the frequencies are base^(-{words}) instead of base^(-2i/K)"
    ratio = measured / base ** (-torch.arange(0, turned, 2, dtype=torch.float64) / turned)
    if float(measured.amax()) <= bound:
        return "nothing is rotated as positions go on"
    if float((ratio - ratio[0]).abs().amax()) <= bound and abs(float(ratio[0]) - 1) > bound:
        return f"all angles are {float(ratio[0]):.4g} times too large: positions are scaled"
    if len(measured) > 1 and 0 < float(measured[1]) < 1:
        used = float(measured[1]) ** (-turned / 2)
        told = f"the second frequency belongs to base {used:.6g} instead of {base:g}"
        exactly = used if len(measured) < 3 else float(measured[-1]) ** (-turned / (2 * (len(measured) - 1)))
        same = abs(exactly / used - 1) < 1e-3 and used > 1
        return f"{told}: declare base={used:.6g} if that is meant" if same and f"{used:.6g}" != f"{base:g}" else told
    return None


@holds(
    "rotary.precision",
    statement="Angles are right at positions of 10^5 under bfloat16 autocast.",
    formula="|R_p x - R_p^exact x| small at p = 10^5",
    source="Documented defects: angles in half precision are wrong by whole turns at long context.",
    kinds=_KIND,
    level="extended",
    examples_factor=0.5,
    catches=("RP01", "RP02"),
)
def angles_survive_autocast(case: Case) -> None:
    """Neighbouring positions must stay as far apart at 10^5 as they are at 0: the product <R_p q, R_{p+1} q> depends on
    the distance alone. A bfloat16 position has 8 bits, so 10^5 and 10^5 + 1 are the same there.
    """
    rotating = _Rotating(case)
    far = case.choice("p", (100_000, 30_000, 5_000))
    x = rotating.vectors(1).to(torch.float32)
    with torch.autocast(case.bench.device.type, dtype=torch.bfloat16):
        near = [rotating.at(x, torch.tensor([p])).double() for p in (0, 1)]
        try:
            away = [rotating.at(x, torch.tensor([p])).double() for p in (far, far + 1)]
        except SubjectError:  # its table ends before: a nearer one is drawn
            case.reject(f"position {far} is refused")
    got, expected = ((pair[0] * pair[1]).sum(dim=-1) for pair in (away, near))
    size = float(x.double().square().sum(dim=-1).amax())
    # float32 angles at p err by p omega (log(base) + 3) eps, of which the frequency's share cancels between neighbours;
    # what remains is the rounding of the angle itself, p eps, and of bfloat16 outputs, 2^-8
    bound = size * (4 * far * epsilon(torch.float32) + 4 * 2.0**-8)

    def turned() -> None:
        with torch.autocast(case.bench.device.type, dtype=torch.bfloat16), off_the_record(case):
            rotating.at(x, torch.tensor([far]))

    case.close(got, expected, f"at position {far} neighbouring positions are no longer told apart as at 0", bound=bound,
               cause=lambda: angles_in_half(turned))  # fmt: skip
    case.witness()


def _shiftable(subject: Subject) -> str | None:
    if subject.fact("padding_side", "right") not in ("left", "both"):
        return "positions can only be shifted by left padding; declare padding_side='both' if it is supported"
    return None


@holds(
    "rotary.values-untouched",
    statement="Shifting all positions changes nothing in a model whose positions are relative.",
    formula="f(x; p + s) = f(x; p)",
    source="Only differences of positions enter scores, and values carry no position.",
    kinds=tuple(k for k in SEQUENCES if k not in ("encoder_decoder", "cross_attention")),
    level="extended",
    unless=(
        needs_fact("positions", "rotary", "alibi", "t5", "relative"),
        needs_mask("padding"),
        _shiftable,
        excludes_fact("prefix"),
    ),
    catches=("RP12",),
)
def relative_models_ignore_a_common_shift(case: Case) -> None:
    """A rotation of the values (without the inverse on the outputs) would leave absolute positions in the stream. Shown
    by left padding under a mask: a model that counts positions from the padding on is shifted by it, one that counts
    real tokens is not, and both must give the same.
    """
    stream = Stream(case, case.built())
    length, pad = case.length("T", low=2, high=8), case.integer("pad", 1, 4)
    longest = min(stream.built.config.max_len, int(case.subject.fact("max_len", stream.built.config.max_len)))
    if length + pad > longest:
        case.reject("the padded sequence is too long for the subject")
    x = stream.draw(2, length)
    padded = torch.cat([stream.draw(2, pad), x], dim=1)
    mask = torch.ones(padded.shape[:2], dtype=torch.bool, device=x.device)
    mask[:, :pad] = False
    try:
        shifted = stream(padded, mask, path=Path(mask="padded"))
    except SubjectError:
        case.reject("the padded sequence is too long for the subject")
    plain = stream(x)
    kept = shifted[:, pad:] if stream.per_position else shifted
    case.close(
        kept,
        plain,
        f"shifting all positions by {pad} changes the output",
        bound=case.shifted_bound(stream.built, kept, plain),
    )
    if size_of(plain):
        case.witness()

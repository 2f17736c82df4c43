"""Sinusoidal positions: the closed form, and the structure that makes shifts linear."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from veriformer.properties.bench.guards import SubjectError
from veriformer.properties.bench.pool import Built
from veriformer.properties.causes.sinusoids import table_cause
from veriformer.properties.definitions.angles import paired
from veriformer.properties.definitions.rounding import epsilon
from veriformer.properties.definitions.sinusoids import closed_form, table_bound
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.premises import needs_fact, needs_module
from veriformer.properties.engine.property import holds
from veriformer.properties.formulas.angle_sums import angle_sum_cause
from veriformer.properties.formulas.moved_rows import moved_rows, period_cause

_KIND = ("positions",)
_SINUSOIDAL = needs_fact("positions", "sinusoidal")
_PAPER = "Vaswani et al. 2017, section 3.5."
_LENGTHS = {"quick": (7, 64, 512), "standard": (7, 64, 512, 5000), "thorough": (7, 64, 512, 5000, 1_000_000)}


def _reach(case: Case) -> int:
    """Return the longest table that may be asked for."""
    if case.subject.is_functional or case.subject.fact("beyond_max_len") == "works":
        return 10**9
    return int(min(case.subject.fact("max_len", 10**9), case.config().max_len))


def _table(case: Case, built: Built, length: int) -> Tensor:
    table = case.call(built, length).detach()
    if table.ndim != 2 or table.shape[0] != length:
        raise SubjectError(f"forward returned shape {list(table.shape)} for a length of {length}; positions are [T, D]")
    return table.cpu()


def _layout(case: Case, table: Tensor) -> str:
    """Return the declared channel order, else the one that the table is nearer to."""
    declared = case.subject.fact("layout")
    if declared:
        return str(declared)
    base = float(case.subject.fact("base", 10000.0))
    errors = {
        layout: float((table.double() - closed_form(table.shape[0], table.shape[1], base, layout)).abs().mean())
        for layout in ("interleaved", "halves")
    }
    return min(errors, key=lambda layout: errors[layout])


def _cause(case: Case, table: Tensor) -> str | None:
    """Name the wrong formula of the table, or the positions whose rows stand elsewhere."""
    base, layout = float(case.subject.fact("base", 10000.0)), _layout(case, table)
    offset = case.subject.fact("position_offset", 0)
    told = table_cause(table, base, layout) or moved_rows(table, base, layout, offset)
    return told or _of_two_angles(table, base, layout, offset) or period_cause(table)


def _of_two_angles(table: Tensor, base: float, layout: str, offset: int) -> str | None:
    length, width = table.shape
    if width % 2:
        return None
    bound = 4 * float(table_bound(length, width, base, layout, table.dtype).amax())
    return angle_sum_cause(*paired(table, layout), torch.arange(length) + offset, base, bound)


@holds(
    "sinusoidal.definition",
    statement="The table is the closed form: sines and cosines of p / base^(2i/d).",
    formula="PE(p, 2i) = sin(p base^(-2i/d)), PE(p, 2i+1) = cos(p base^(-2i/d))",
    source=_PAPER,
    kinds=_KIND,
    unless=_SINUSOIDAL,
    catches=("PE01", "PE02", "PE04", "PE05", "PE08"),
)
def the_table_is_the_closed_form(case: Case) -> None:
    """Properties of shifts alone are blind to wrong frequencies, so the values themselves are compared, in float64, up
    to position 10^6 in profile thorough. An undeclared channel order may be interleaved or halves.
    """
    built = case.built()
    lengths = {min(n, _reach(case)) for n in _LENGTHS[case.bench.settings.profile]}
    length = case.choice("T", sorted(lengths))
    table = _table(case, built, length)
    base, layout = float(case.subject.fact("base", 10000.0)), _layout(case, table)
    case.close(
        table.double(),
        closed_form(table.shape[0], table.shape[1], base, layout, case.subject.fact("position_offset", 0)),
        "the table is not that of the formula",
        bound=table_bound(table.shape[0], table.shape[1], base, layout, table.dtype),
        cause=lambda: _cause(case, table),
    )
    case.witness()


@holds(
    "sinusoidal.bounded",
    statement="Values lie in [-1, 1], rows have norm sqrt(d/2), and position 0 is (0, 1, 0, 1, ...).",
    formula="|PE| <= 1, |PE(p)|^2 = d/2, PE(0)_{2i} = 0, PE(0)_{2i+1} = 1",
    source="Course notes, section 3.2: sin^2 + cos^2 = 1 in every pair.",
    kinds=_KIND,
    unless=_SINUSOIDAL,
    catches=("PE01", "PE05"),
)
def rows_lie_on_a_sphere(case: Case) -> None:
    """Even widths; of an odd width the last sine has no cosine."""
    built = case.built()
    table = _table(case, built, min(case.integer("T", 2, 200), _reach(case)))
    width, rounding = table.shape[1], 2 * epsilon(torch.float32) + 2 * epsilon(table.dtype)
    largest = table.abs().amax()
    case.require(largest <= 1 + rounding, "a value lies outside [-1, 1]", got=f"{largest:.6g}", expected="at most 1")
    if width % 2 == 0:
        squares = table.double().square().sum(dim=1)
        case.close(
            squares,
            torch.full_like(squares, width / 2),
            "a row does not have norm sqrt(d/2)",
            bound=width * rounding,
            constants_allowed=True,
        )
    if not case.subject.fact("position_offset", 0):
        first = closed_form(1, width, 10000.0, _layout(case, table))
        case.close(
            table[:1].double(), first, "position 0 is not (0, 1, 0, 1, ...)", bound=rounding, constants_allowed=True
        )
    case.witness()


def _shift_matrix(table: Tensor, by: int) -> tuple[Tensor, float]:
    """Return the least-squares `M` with PE(p + k) = PE(p) M on even positions, and the condition of the fit."""
    rows = table[: len(table) - by : 2].double()
    targets = table[by::2].double()[: len(rows)]
    condition = float(torch.linalg.cond(rows))
    return torch.linalg.lstsq(rows, targets, driver="gelsd").solution, condition


@holds(
    "sinusoidal.relative-shift",
    statement="One matrix, the same for all positions, moves the encoding by k.",
    formula="PE(p + k) = M_k PE(p) for all p; M_k M_k^T = I, M_a M_b = M_{a+b}",
    source="Course notes, section 3.2, item 3: the addition theorems of sine and cosine.",
    kinds=_KIND,
    unless=_SINUSOIDAL,
    catches=("PE01",),
)
def shifts_are_linear(case: Case) -> None:
    """M_k is found by least squares on every other position and confirmed on the others, so a table that merely
    happens to fit fails. Orthogonality and composition carry the condition of the fit.
    """
    built = case.built()
    by, further = case.integer("k", 1, 9), case.integer("more", 1, 5)
    probe = _table(case, built, min(4, _reach(case)))
    width = probe.shape[1]
    length = min(24 * width, 400, _reach(case))
    if width % 2 or length < 2 * (width + by + further) + 2:
        case.reject("too few positions, or an odd width, for a fit")
    table = _table(case, built, length)
    noise = float(
        table_bound(length, width, float(case.subject.fact("base", 10000.0)), "interleaved", table.dtype).amax()
    )
    shift, condition = _shift_matrix(table, by)
    held_out = table[1 : length - by : 2].double()
    moved = table[1 + by :: 2].double()[: len(held_out)]
    # a prediction inside the range of the fit errs by the noise of both tables times sqrt(d) for the sum
    case.close(held_out @ shift, moved, f"no single matrix moves the encoding by {by}", bound=8 * width**0.5 * noise,
               cause=lambda: _cause(case, table))  # fmt: skip
    limit = 8 * condition * noise
    if limit < 0.1:
        identity = torch.eye(width, dtype=torch.float64)
        case.close(shift @ shift.T, identity, f"the matrix that moves by {by} is not orthogonal", bound=limit * width)
        second, third = _shift_matrix(table, further)[0], _shift_matrix(table, by + further)[0]
        case.close(
            shift @ second,
            third,
            f"moving by {by} and then by {further} is not moving by {by + further}",
            bound=4 * limit * width,
        )
    case.witness()


@holds(
    "sinusoidal.inner-product",
    statement="The inner product of two encodings depends on their distance alone.",
    formula="<PE(p), PE(p + k)> = sum_i cos(omega_i k)",
    source="Course notes, section 3.2: cos(a - b) = cos a cos b + sin a sin b.",
    kinds=_KIND,
    unless=_SINUSOIDAL,
    catches=("PE01", "PE04"),
)
def inner_products_depend_on_distance(case: Case) -> None:
    """Compared with the sum of cosines at the declared frequencies, and between all pairs of one distance."""
    built = case.built()
    length = min(case.integer("T", 8, 200), _reach(case))
    given = _table(case, built, length)
    table, width = given.double(), given.shape[1]
    if width % 2:
        case.reject("the last sine of an odd width has no cosine")
    by = case.integer("k", 0, length - 2)
    base = float(case.subject.fact("base", 10000.0))
    omega = base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    got = (table[: length - by] * table[by:]).sum(dim=1)
    expected = (omega * by).cos().sum().expand_as(got)
    noise = float(table_bound(length, width, base, "interleaved", built.dtype).amax())
    case.close(
        got,
        expected.clone(),
        f"inner products at distance {by} are not the sum of cosines",
        bound=3 * width * noise,
        constants_allowed=True,
        cause=lambda: _cause(case, given),
    )
    case.witness()


@holds(
    "sinusoidal.unique",
    statement="No two positions have the same encoding.",
    formula="PE(p) != PE(r) for p != r",
    source="Course notes, section 3.2, item 2.",
    kinds=_KIND,
    level="extended",
    unless=_SINUSOIDAL,
    catches=("PE04",),
)
def positions_are_distinct(case: Case) -> None:
    """The fastest channel alone tells neighbours apart by 2 sin(1/2); the smallest distance must exceed rounding."""
    built = case.built()
    length = min(case.choice("T", (64, 300, 1000)), _reach(case))
    given = _table(case, built, length)
    table = given.double()
    apart = torch.cdist(table, table) + torch.eye(length, dtype=torch.float64) * 1e9
    smallest = apart.min()
    limit = 64 * epsilon(torch.float32) * table.shape[1] ** 0.5
    case.require(
        smallest > limit,
        "two positions have the same encoding",
        got=f"distance {smallest:.3g}",
        expected=f"above {limit:.3g}",
        cause=lambda: _cause(case, given),
    )
    case.witness()


@holds(
    "sinusoidal.wavelengths",
    statement="Wavelengths grow geometrically from 2 pi to 2 pi base^((d-2)/d).",
    formula="lambda_i = 2 pi base^(2i/d)",
    source="Course notes, lecture 8, section 4.1, made exact: the last is 2 pi base^((d-2)/d), not 2 pi base.",
    kinds=_KIND,
    level="extended",
    unless=_SINUSOIDAL,
    catches=("PE02", "PE04"),
)
def wavelengths_are_geometric(case: Case) -> None:
    """Read off the table: the angle between positions p and p + 1 in each pair of channels is the frequency."""
    built = case.built()
    at = case.integer("p", 0, max(0, min(50, _reach(case) - 2)))
    table = _table(case, built, at + 2)
    width = table.shape[1]
    if width % 2:
        case.reject("pairs need an even width")
    pairs = (
        table.double().unflatten(1, (2, -1)).transpose(1, 2)
        if _layout(case, table) == "halves"
        else (table.double().unflatten(1, (-1, 2)))
    )
    angles = torch.atan2(pairs[..., 0], pairs[..., 1])
    turn = torch.remainder(angles[at + 1] - angles[at], 2 * math.pi)
    base = float(case.subject.fact("base", 10000.0))
    expected = base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    noise = float(table_bound(at + 2, width, base, "interleaved", table.dtype).amax())
    case.close(
        turn,
        expected,
        "the frequencies are not base^(-2i/d)",
        bound=4 * noise,
        cause=lambda: table_cause(table, base, _layout(case, table)),
    )
    case.witness()


@holds(
    "sinusoidal.no-parameters",
    statement="Sinusoidal positions have no trainable parameter, move with .to(), and survive their state dict.",
    formula="theta = {}; f = f after .to(dtype), deepcopy, load_state_dict",
    source="Course notes, section 3.2: deterministic functions; register_buffer.",
    kinds=_KIND,
    unless=(_SINUSOIDAL, needs_module),
    examples_factor=0.25,
    catches=("PE08",),
)
def nothing_is_trained(case: Case) -> None:
    """A table kept as a plain attribute stays behind when the model moves: every tensor reachable from the module must
    have the dtype that the module was moved to.
    """
    built = case.built(fresh=True)
    module = built.module
    length = min(case.integer("T", 1, 20), _reach(case))
    before = _table(case, built, length)
    if not isinstance(module, nn.Module):
        case.reject("no module")
    trained = case.apply(trained_parameters, module)
    case.equal(trained, [], f"the parameter {trained[0] if trained else ''!r} is trainable", expected="none")
    behind = case.apply(left_behind, module)
    case.equal(
        behind,
        [],
        f"the tensor {behind[0][0] if behind else ''!r} stays behind when the module is moved to float64: "
        "it is no buffer",
        got=behind[0][1] if behind else "",
        expected="torch.float64",
    )
    twin = case.copy_of(built)
    twin.module.load_state_dict(module.state_dict())
    case.close(
        _table(case, twin, length),
        before,
        "the table changes through deepcopy and its state dict",
        bound=0.5 * epsilon(before.dtype),
        constants_allowed=True,
    )
    case.witness()


def trained_parameters(module: nn.Module) -> list[str]:
    """Return the names of the parameters that are trained."""
    return [name for name, p in module.named_parameters() if p.requires_grad]


def left_behind(module: nn.Module) -> list[tuple[str, str]]:
    """Return the floating point tensors that do not become float64 when a module does, each with its dtype."""
    moved = copy.deepcopy(module).to(torch.float64)
    tensors = [(name, x) for part in moved.modules() for name, x in vars(part).items() if isinstance(x, Tensor)]
    return [(name, str(x.dtype)) for name, x in tensors if x.is_floating_point() and x.dtype != torch.float64]


def _insist_on_running_there(case: Case, tried: Built) -> None:
    try:
        _table(case, tried, 2)
    except SubjectError:
        case.does_not_apply("it runs on the GPU alone, where an index beyond a table ends the process")


@holds(
    "sinusoidal.any-length",
    statement="Beyond max_len the encoding goes on or a clear error is raised; so for an odd width.",
    formula="f(max_len + 1) has max_len + 1 distinct rows, or raises",
    source="Course notes, section 3.3: the formula works at any length.",
    kinds=_KIND,
    level="extended",
    unless=(_SINUSOIDAL, needs_module),
    examples_factor=0.25,
    catches=("PE10", "PE11"),
)
def lengths_are_not_silently_cut(case: Case) -> None:
    """What must not happen is a table that ends, wraps around or repeats its last row without a word."""
    built = case.built()
    length = int(built.config.max_len) + case.integer("beyond", 1, 5)
    case.witness()
    try:
        with case.bench.trying(built) as tried:
            if tried is not built:
                _insist_on_running_there(case, tried)
            _table(case, tried, length)
    except SubjectError as problem:
        cut = "forward returned shape" in str(problem)
        case.require(
            not cut,
            "beyond max_len the table is cut without an error",
            got=str(problem),
            expected="all rows, or an error",
        )
        works = case.subject.fact("beyond_max_len") == "works"
        case.require(
            not works, "lengths beyond max_len are declared to work and raise", got=str(problem), expected="rows"
        )
        return
    apart = case.apply(nearest_repeat, case.caller(built, length), int(built.config.max_len))
    case.require(apart > 1e-6, "beyond max_len earlier rows come again", got="equal rows", expected="new ones")


def nearest_repeat(run: Callable[[], Tensor], max_len: int) -> Tensor:
    """Return how near the rows beyond `max_len` come to earlier ones; infinite where an error says that there are none.

    Args:
        run: gives the table `[T, D]`, T > max_len.
        max_len: rows that it is made for.
    """
    try:
        table = run().detach().double()
    except Exception:
        return torch.tensor(torch.inf)
    return torch.cdist(table[max_len:], table[:max_len]).amin()

"""Attention of half-precision inputs over many keys, and many queries: sums that stick where they are kept in half."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from veriformer.properties.bench.guards import SubjectError
from veriformer.properties.bench.pool import Built
from veriformer.properties.causes.structure import off_the_record
from veriformer.properties.definitions.attention_gradients import row_factor, stored_attention
from veriformer.properties.definitions.rounding import epsilon, rounding_bound
from veriformer.properties.diagnosis.kernels.halves import CHANNELS, HALVES, LENGTHS, level
from veriformer.properties.diagnosis.kernels.tiling import PARTS, Situation, Tiling
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.premises import excludes_fact
from veriformer.properties.engine.property import holds
from veriformer.properties.engine.violations import Violation

_COMPARED = {LENGTHS[0]: (0, 1), LENGTHS[1]: (0, 2, 3)}
"""Parts whose sums are long: the output and dq over keys, dk and dv over queries."""


_WORK = 3e10
"""Multiplications of one case."""


@holds(
    "attention.half-precision",
    statement="In half precision sums over thousands of keys, or of queries, are those of a wider sum, stored once.",
    formula="|o - softmax(q k^T * scale) v| <= u_store (|o| + sum_j |w_j v_j|), u_store of the inputs' dtype",
    source="Higham 2002, 4.2: a sum of n equal terms in a format of p bits stops growing at 2^p of them.",
    kinds=("attention",),
    level="extended",
    unless=(
        excludes_fact("sink"),
        excludes_fact("query_key_norm"),
        excludes_fact("sparse"),
        excludes_fact("prefix"),
        excludes_fact("half_precision", False),
        # what it hides is another sum, and a cap moves scores
        excludes_fact("causal", True),
        excludes_fact("window"),
        excludes_fact("soft_cap"),
        excludes_fact("positions", "rotary", "alibi", "t5", "relative", "other", "sinusoidal", "learned"),
    ),
    examples_factor=0.2,
)
def sums_do_not_stick(case: Case) -> None:
    """Outputs and gradients in bfloat16 and float16 where thousands of equal terms are summed.

    A kernel may refuse a dtype, and may store whatever it likes in it; its sums must be wider (`stored_attention`).
    What is right in float32 is a question here: whoever sums in half precision may mean it for short sequences.
    """
    tiling, work, compared = Tiling(case, case.built()), _WORK, False
    if tiling.has_weights or case.bench.settings.dtypes:
        case.does_not_apply("its sums are not those of q, k and v alone, or one dtype was asked for")
    first = case.choice("format", HALVES)
    for name in (first, *(name for name in HALVES if name != first)):
        built = case.bench.pool.get(tiling.built.config, getattr(torch, name))
        taken = False
        for queries, keys in LENGTHS:
            # a gradient of thousands of weights may underflow in float16, and rightly
            gradients = built.dtype != torch.float16 or keys < queries
            s = Situation("", 1, 1, queries, keys, CHANNELS, gradients=gradients)
            if tiling.fitted(s) is None:
                continue
            with off_the_record(case):
                work -= tiling.foreseen(s)
            if work < 0 and not (taken or compared):
                case.does_not_apply(f"it loops over {keys} keys in many small steps")
            if work < 0:
                case.leave_out(f"{keys} keys: too many small steps")
                case.witness()
                return
            drawn = level(lambda *n: case.normal(*n, dtype=torch.float64), queries, keys, tiling.scale(s))
            taken |= _compare(case, built, s, tiling.scale(s), *(x.to(built.dtype) for x in drawn))
        compared |= taken
        if taken:
            break
    if not compared:
        case.does_not_apply("it takes neither bfloat16 nor float16")
    case.witness()


def _compare(
    case: Case, built: Built, s: Situation, scale: float, query: Tensor, key: Tensor, value: Tensor, weight: Tensor
) -> bool:
    """Compare in the dtype of a model, on numbers of a half precision; return whether it takes them."""
    inputs = [x.requires_grad_() for x in (query, key, value)]
    try:
        got = case.call(built, *inputs)
        found = [got]
        if s.gradients and got.requires_grad and got.shape == weight.shape:
            found += torch.autograd.grad((got * weight).sum(), inputs, materialize_grads=True)
    except (SubjectError, RuntimeError, NotImplementedError):  # it refuses the dtype, or has no backward in it
        return False
    exact = [(x.to(got.device), bound) for x, bound in case.apply(stored_attention, *inputs, scale, weight)]
    factor = row_factor(got, exact[0][0])
    # of what is stored in the dtype itself, and of sums that run in float32 in any order
    limit = epsilon(built.dtype) / 2 * (4 + 2 * (math.log(s.keys) + 1))
    limit += rounding_bound(torch.float32, s.keys, operations=3)
    found[0] = got.double() / factor
    compared = [part for part in _COMPARED[s.queries, s.keys] if part < len(found)]
    is_half = built.dtype.itemsize == 2
    within = all(bool(((found[n].double() - exact[n][0]).abs().cpu() <= exact[n][1]).all()) for n in compared)
    if is_half and not (within and bool(((factor - 1).abs() <= limit).all())):
        wide = case.bench.pool.get(built.config, torch.float32)
        try:
            _compare(case, wide, s, scale, *(x.detach().float() for x in (query, key, value, weight)))
        except Violation:
            case.does_not_apply("it is wrong in float32 as well: no question of precision, see attention.tiles")
    name, asks = str(built.dtype).removeprefix("torch."), ("half_precision", False) if is_half else None
    case.close(
        factor, torch.ones_like(factor), constants_allowed=True, bound=limit, asks=asks,
        what=f"in {name} {s} the weights do not sum to one, by more than what is stored in {name} explains",
        cause=lambda: _cause(case, built, s, scale),
    )  # fmt: skip
    for part in compared:
        expected, bound = exact[part]
        case.close(
            found[part].double(), expected, bound=bound, asks=asks,
            what=f"in {name} {s} the {PARTS[part]} errs by more than what is stored in {name} explains",
            cause=lambda: _cause(case, built, s, scale),
        )  # fmt: skip
    return True


def _cause(case: Case, built: Built, s: Situation, scale: float) -> str | None:
    """Say that float32 gives the right answer on the same numbers, and where the sum of equal weights ends."""
    if built.dtype.itemsize > 2:  # no question of precision: what is wrong there is wrong by other numbers
        return None
    name = str(built.dtype).removeprefix("torch.")
    generator = torch.Generator().manual_seed(s.keys)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(case.bench.device)

    with off_the_record(case):
        query, key, value, weight = (x.to(built.dtype) for x in level(normal, s.queries, s.keys, scale))
        wide = case.bench.pool.get(built.config, torch.float32)
        inputs = [x.float().requires_grad_() for x in (query, key, value)]
        got = case.call(wide, *inputs)
        found = [got.detach()]
        if got.requires_grad:
            found += torch.autograd.grad((got * weight.float()).sum(), inputs, materialize_grads=True)
        exact = stored_attention(query, key, value, scale, weight)
        pairs = zip(found, exact, strict=False)
        if not all(bool(((x.double().cpu() - y).abs() <= bound).all()) for x, (y, bound) in pairs):
            return None
        ones = float(case.call(built, torch.zeros_like(query), key, torch.ones_like(value)).detach().double().mean())
    if ones > 1.05:
        return f"the sum of equal weights stops growing at {s.keys / ones:.4g}: it is kept in {name}, not in float32"
    return f"float32 gives the right answer on the same numbers: a sum of many terms is kept in {name}"

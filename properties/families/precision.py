"""Numbers of fewer bits, mixed precision, and compiled code: the same answer, within what the numbers allow."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from veriformer.properties.bench.compiling import why_not_compiled
from veriformer.properties.bench.guards import SubjectError
from veriformer.properties.bench.measured import given_dtype, half_tolerance_of, is_swamped, makes_choices, tolerance_of
from veriformer.properties.bench.pool import Built
from veriformer.properties.definitions.differences import size_of, worst_difference
from veriformer.properties.definitions.rounding import epsilon
from veriformer.properties.engine.calling import Caller, refuses
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.premises import excludes_fact, needs_module
from veriformer.properties.engine.property import holds
from veriformer.properties.engine.stream import SEQUENCES, Stream, sides
from veriformer.properties.families.narrowing import counted_in_half, half_inside
from veriformer.properties.subject.inputs import has_ordinary_inputs, ordinary
from veriformer.properties.subject.kinds import KINDS
from veriformer.properties.subject.palette import LONG
from veriformer.properties.subject.paths import Path

_KINDS = tuple(kind for kind in KINDS if has_ordinary_inputs(kind) and kind not in ("positions", "position_bias"))
_COUNTED = 300
"""Positions, well beyond the 256 that bfloat16 tells apart."""
LADDER = {"single": (torch.float32,), "half": (torch.bfloat16, torch.float16)}


@holds(
    "numerics.precision-ladder",
    statement="float32, bfloat16 and float16 give the float64 answer, within the rounding of their numbers.",
    formula="|f_u(x) - f_64(x)| <= tol(u) |f_64|, u = 2^-24, 2^-8, 2^-11; errors reported in units of the last place",
    source="Higham 2002, 3.1; Higham & Mary 2019.",
    kinds=_KINDS,
    requires=("parameters.registered",),
    catches=("NM12", "NM14", "RP05"),
    copies=True,
)
def fewer_bits_give_the_same_answer(case: Case) -> None:
    """The float64 model has the rounded weights and buffers of the other, so that the arithmetic alone is judged; the
    tolerance is measured on the subject by moving weights and inputs by one unit in the last place. A sum over
    hundreds of terms, positions or a softmax in the low precision fall outside. A subject that refuses a dtype is
    right too; where float64 is not its own it is computed from float32. A float32 model that rounds to 16 bits inside
    does so in float64 as well: that is looked for. With a mask as well, where it takes one: what hides a score must be
    a number of the dtype. Rotations in half precision stand at positions around 500, where neighbours are one number
    in bfloat16 and an angle of float32 is still right to 3e-5; and no text of 300 is counted in bfloat16.
    """
    rung = case.choice("ladder", tuple(LADDER))
    if rung == "half" and case.subject.fact("half_precision") is False:
        case.reject("it is not meant for half precision")
    for dtype in LADDER[rung]:
        _judge(case, dtype)
    if rung == "single" and not case.subject.fact("quantised"):
        _judge_inside(case)
    if rung == "half" and case.subject.kind in SEQUENCES:
        _judge_counting(case)


def _judge_inside(case: Case) -> None:
    """Ask about 16 bits inside a forward of float32: the float64 model has them too, so that the two agree."""
    low = case.bench.pool.get(case.config(), torch.float32)
    inputs = ordinary(case.subject, low.config, case.generator, torch.float32)
    tensors = [x.to(case.bench.device) for x in inputs.tensors]
    found = case.apply(half_inside, case.caller(low, *tensors, *inputs.extras))
    case.equal(
        found, "", "in a model of float32 something is computed in 16 bits", got=found, expected="float32 throughout",
        cause=lambda: f"numbers are rounded to 16 bits on the way: {found}", asks=("quantised", True),
    )  # fmt: skip


def _judge_counting(case: Case) -> None:
    """Hold a long text in bfloat16 to positions that are told apart: small models have too few for that to show."""
    config = case.bench.pool.reaching[LONG]
    if min(config.max_len, case.subject.fact("max_len", config.max_len)) < _COUNTED:
        return
    low = case.bench.pool.get(config, torch.bfloat16)
    for side in sides(case.subject):
        stream = Stream(case, low, side=side)
        try:
            found = case.apply(counted_in_half, case.caller(low, *stream.inputs(stream.draw(1, _COUNTED))))
        except SubjectError:
            return  # a length or a dtype that it refuses; others say so
        case.equal(
            found, "", "in bfloat16 neighbouring positions are one number", got=found, expected="positions told apart",
            cause=partial(_counted_as, found), asks=("half_precision", False),
        )  # fmt: skip


def _counted_as(found: str) -> str:
    return (
        "positions are counted in the dtype of the model, whose whole numbers end at 256: "
        f"{found} has the number of the one before"
    )


def _judge(case: Case, dtype: torch.dtype) -> None:
    """Hold one dtype against float64, without a mask and with one."""
    if case.subject.module is not None and given_dtype(case.bench) != torch.float32 and dtype == torch.float32:
        case.reject("the instance is of fewer bits already")
    try:
        low = case.bench.pool.get(case.config(), dtype)
        inputs = ordinary(case.subject, low.config, case.generator, dtype)
        tensors = [x.to(case.bench.device) for x in inputs.tensors]
        if dtype != torch.float32 and makes_choices(case.bench, low):
            case.reject("it picks by numbers that it computes (top-k); rounding to half precision flips such picks")
        tensors = _far(case, low, tensors)
        answers: list[tuple[dict[str, Any], Tensor]] = [({}, case.call(low, *tensors, *inputs.extras).detach())]
        tolerance = tolerance_of(case.bench, low)
    except SubjectError as problem:
        if _is_refusal(problem):
            case.witness()
            return
        raise
    for given in _masks(case, tensors):
        try:
            answers.append((given, case.call(low, *tensors, *inputs.extras, **given).detach()))
        except SubjectError as problem:
            if "overflow" in str(problem) and case.subject.fact("half_precision") is not False:
                _does_not_fit(case, case.caller(low, *tensors, *inputs.extras, *given.values()), dtype)
            if not _is_refusal(problem):
                raise
    if is_swamped(case.bench, low):
        case.reject("it amplifies rounding beyond what this dtype can show")
    wide = replace(case.copy_of(low), dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's own: copied ScriptModules are looked at for a gradient
        case.apply(_widen, wide.module)
    allowed = tolerance / epsilon(dtype)
    for given, answer in answers:
        try:
            exact = case.call(wide, *[_wide(x) for x in tensors], *inputs.extras, **given).detach()
        except SubjectError:
            case.does_not_apply("it does not run in float64, which the others are judged by")
        hides_outputs = "attention_mask" in given and case.subject.kind != "attention" and answer.ndim == 3
        real = given["attention_mask"] if hides_outputs else ...
        got, expected = answer[real].double(), exact[real].double()
        under = " under a mask" if given else ""
        asks = None if dtype == torch.float32 else ("half_precision", False)
        case.finite(got, f"in {_name(dtype)} the output is NaN or infinite{under}", asks=asks)
        if not bool(expected.isfinite().all()):
            case.does_not_apply("in float64 it is NaN or infinite: a constant of float64 in a tensor of float32, say")
        ulps = worst_difference(got, expected, size_of(expected)).error / epsilon(dtype)
        case.measure(f"ulps in {_name(dtype)}", ulps)
        case.close(
            got,
            expected,
            f"{_name(dtype)} gives another answer than float64{under}, by {ulps:.3g} units in the last place where "
            f"{allowed:.3g} are rounding",
            asks=asks,
            bound=tolerance * size_of(expected),
            constants_allowed=True,
        )
    case.witness()


def _far(case: Case, low: Built, tensors: list[Tensor]) -> list[Tensor]:
    """Return what a rotation is called on, at positions around 500 in half precision, where it has these."""
    if case.subject.kind != "rotary" or low.dtype == torch.float32:
        return tensors
    x, positions = tensors
    try:
        case.call(low, x, positions + 500)
    except SubjectError:  # a table that ends before
        return tensors
    return [x, positions + 500]


def _does_not_fit(case: Case, call: Caller, dtype: torch.dtype) -> None:
    """Fail since a forward that runs without a mask raises under one."""
    case.require(
        ~case.apply(refuses, call),
        f"in {_name(dtype)} it runs without a mask and raises under one",
        got="an overflow",
        expected="an answer",
        cause=lambda: f"a number that the mask puts in place of a score does not fit {_name(dtype)}: overflow",
        asks=("half_precision", False),
    )


def _masks(case: Case, tensors: list[Tensor]) -> list[dict[str, Any]]:
    """Return a mask that hides the last key or position, where the subject takes one."""
    subject = case.subject
    if subject.kind == "cross_attention" and subject.takes_mask("padding") and subject.accepts("memory_mask"):
        mask = torch.ones(tensors[1].shape[:2], dtype=torch.bool, device=tensors[1].device)
        mask[..., -1] = False
        return [{"memory_mask": mask}]
    if subject.kind == "cross_attention" or not subject.accepts("attention_mask"):
        return []
    if subject.kind == "attention" and (subject.takes_mask("pairwise") or subject.takes_mask("padding")):
        query, key = tensors[:2]
        mask = torch.ones(query.shape[0], 1, query.shape[2], key.shape[2], dtype=torch.bool, device=query.device)
    elif subject.kind != "attention" and subject.takes_mask("padding"):
        mask = torch.ones(tensors[0].shape[:2], dtype=torch.bool, device=tensors[0].device)
    else:
        return []
    mask[..., -1] = False
    return [{"attention_mask": mask}]


def _is_refusal(problem: SubjectError) -> bool:
    words = ("not implemented for", "not supported", "only supported for", "unsupported", "same dtype", "mixed dtype",
             "expected scalar type",
             "cannot be converted to type", "must match in dtype", "have same dtype")  # fmt: skip
    return any(word in str(problem).lower() for word in words)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _wide(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x


def _widen(module: Any) -> None:
    if isinstance(module, nn.Module):
        module.double()


@holds(
    "numerics.autocast",
    statement="Under autocast to either half type the output is finite, and the one without it within rounding.",
    formula="|f_autocast(x) - f(x)| <= tol(u) |f|, u = 2^-8, 2^-11",
    source="torch.amp; documented bug PM05: mask constants that overflow in half precision.",
    kinds=_KINDS,
    level="extended",
    unless=(needs_module, excludes_fact("half_precision", False)),
    examples_factor=0.5,
    catches=("PM05",),
    asks=("half_precision", False),
)
def autocast_changes_only_the_rounding(case: Case) -> None:
    """With a padding mask too, where the subject takes one: constants that hide scores must survive the lower
    precision. An error under autocast, where the plain call works, is a defect; what has no number in float16, with and
    without a mask, refuses that dtype, which is right.
    """
    built = case.built(dtype=torch.float32)
    if makes_choices(case.bench, built):
        case.does_not_apply("it picks by numbers that it computes (top-k); rounding to half precision flips such picks")
    wanted = LADDER["half"][: 1 if case.bench.pool.is_large else None]  # one copy more of such a model
    halves = [d for d in wanted if not is_swamped(case.bench, case.bench.pool.get(built.config, d))]
    if torch.bfloat16 not in halves:
        case.does_not_apply("it amplifies rounding beyond what bfloat16 can show")
    inputs = ordinary(case.subject, built.config, case.generator, torch.float32)
    tensors = [x.to(case.bench.device) for x in inputs.tensors]
    given: dict[str, Any] = {}
    masked = case.subject.kind != "cross_attention" and case.subject.accepts("attention_mask")
    if case.subject.takes_mask("padding") and masked and case.flag("masked"):
        mask = torch.ones(tensors[0].shape[:2], dtype=torch.bool, device=case.bench.device)
        mask[0, -2:] = False
        given["attention_mask"] = mask
    expected = case.call(built, *tensors, *inputs.extras, **given).detach()
    for dtype in halves:
        path = Path(autocast=_name(dtype))
        under = "under autocast" if dtype == torch.bfloat16 else "under autocast to float16"
        try:
            got = case.call(built, *tensors, *inputs.extras, path=path, **given).detach()
        except SubjectError as problem:
            run = case.caller(built, *tensors, *inputs.extras, path=path)
            if dtype == torch.float16 and _is_refusal(problem) and (not given or bool(refuses(run))):
                continue  # it refuses float16 whatever it is given, which is right, as in numerics.precision-ladder
            works = False if given else case.apply(runs_under_autocast, run, case.bench.device.type, _name(dtype))
            case.require(works, f"it raises {under}", got=str(problem)[:200], expected="an output")
            return
        real = given["attention_mask"] if given and expected.ndim == 3 else ...
        case.finite(got[real], f"{under} the output is NaN or infinite")
        case.close(got.double()[real], expected.double()[real], f"{under} the output is another one",
                   bound=half_tolerance_of(case.bench, built, dtype) * size_of(expected),
                   constants_allowed=True)  # fmt: skip
    case.witness()


def runs_under_autocast(run: Callable[[], object], device: str, dtype: str) -> Tensor:
    """Return whether a call works under autocast to a dtype."""
    try:
        with torch.autocast(device, dtype=getattr(torch, dtype)):
            run()
    except Exception:
        return torch.tensor(False)
    return torch.tensor(True)


@holds(
    "numerics.compile",
    statement="Compiled by torch.compile the subject gives the same output and gradients.",
    formula="compile(f)(x) = f(x); d compile(f) = d f",
    source="torch.compile; documented bugs of fused kernels and of masks traced as constants.",
    kinds=_KINDS,
    level="extended",
    unless=(needs_module, why_not_compiled),
    examples_factor=0.05,
    costly=True,
    catches=("BK04",),
)
def compiled_code_gives_the_same(case: Case) -> None:
    """With dynamic shapes, at two lengths, in eval mode: what the tracer took for a constant shows at the second
    length. Minutes for large models, so it runs in the profile thorough, or when it is named.
    """
    built = case.built(dtype=torch.float32)
    forms: list[Callable[[Tensor], Tensor]] = [lambda x: x]
    if case.subject.takes_tokens or case.subject.kind in ("self_attention", "layer", "norm", "feed_forward"):
        forms.append(lambda x: x[:, :-2] if x.ndim > 1 else x)
    for number, form in enumerate(forms):
        inputs = ordinary(case.subject, built.config, case.generator, torch.float32)
        tensors = [form(x.to(case.bench.device)) for x in inputs.tensors]
        expected = case.call(built, *tensors, *inputs.extras)
        got = case.call(built, *tensors, *inputs.extras, path=Path(compiled=True))
        at = "" if number == 0 else " at another length"
        case.close(got.detach(), expected.detach(), f"compiled it gives another output{at}", constants_allowed=True)
    case.witness()

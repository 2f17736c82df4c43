"""Numerics: what every other property rests on. Finite answers, the same answer twice, inputs left alone."""

from __future__ import annotations

import torch

from veriformer.properties.case import Case
from veriformer.properties.inputs import has_ordinary_inputs, ordinary
from veriformer.properties.property import holds
from veriformer.properties.subject import KINDS

_CALLABLE = tuple(kind for kind in KINDS if has_ordinary_inputs(kind))
_WITH_TENSORS = tuple(kind for kind in _CALLABLE if kind not in ("positions", "position_bias"))


@holds(
    "numerics.finite",
    statement="Ordinary inputs give finite outputs.",
    formula="|x| ordinary  =>  |f(x)| < inf",
    source="IEEE 754; the premise of every comparison.",
    kinds=_CALLABLE,
    catches=("PM01",),
)
def ordinary_inputs_give_finite_outputs(case: Case) -> None:
    """Unit normal values, values a hundred times larger or smaller, constants and duplicates are ordinary."""
    built = case.built()
    # float16 ends at 65504: the scores of inputs of 100 are out of its range, whatever the implementation
    scale = case.choice("scale", (1.0, 0.01, 0.0) if built.dtype == torch.float16 else (1.0, 0.01, 100.0, 0.0))
    inputs = ordinary(case.subject, built.config, case.generator, built.dtype)
    tensors = [(x * scale if x.is_floating_point() else x).to(case.bench.device) for x in inputs.tensors]
    for path in case.paths(masks=("none",)):
        output = case.call(built, *tensors, *inputs.extras, path=path)
        case.finite(output, "an ordinary input gives NaN or infinity")
    case.witness()


@holds(
    "numerics.stateless",
    statement="The same call twice, with another call between, gives the same output.",
    formula="f(x) = f(x) after f(y)",
    source="Definition of a function; documented failures: dropout left on in eval, caches keyed on too little.",
    kinds=_CALLABLE,
    catches=("DR01", "RP08", "KV04"),
)
def calls_do_not_depend_on_one_another(case: Case) -> None:
    """In eval mode a subject is a function: no dropout, no state that one call leaves for the next."""
    built = case.built()
    first, other = (ordinary(case.subject, built.config, case.generator, built.dtype) for _ in range(2))
    for inputs in (first, other):
        inputs.tensors[:] = [x.to(case.bench.device) for x in inputs.tensors]
    before = case.call(built, *first.tensors, *first.extras).clone()
    case.call(
        built, *[x[..., :3] if x.ndim > 1 and not x.is_floating_point() else x for x in other.tensors], *other.extras
    )
    after = case.call(built, *first.tensors, *first.extras)
    case.close(after, before, "the same call gives another output the second time", constants_allowed=True)
    case.witness()


@holds(
    "numerics.no-mutation",
    statement="The caller's tensors are unchanged by a call.",
    formula="x before f(x) = x after f(x)",
    source="torch convention: in-place functions end in an underscore.",
    kinds=_WITH_TENSORS,
)
def inputs_are_left_alone(case: Case) -> None:
    """Checked to the bit on every path, since a fast path can alter what the slow one leaves alone."""
    built = case.built()
    inputs = ordinary(case.subject, built.config, case.generator, built.dtype)
    for path in case.paths(masks=("none",)):
        given = [x.to(case.bench.device).clone() for x in inputs.tensors]
        kept = [x.clone() for x in given]
        case.call(built, *given, *inputs.extras, path=path)
        for number, (now, was) in enumerate(zip(given, kept, strict=True)):
            case.require(
                torch.equal(now, was),
                f"the call changed the caller's tensor (argument {number})",
                got="altered entries",
                expected="the tensor as it was given",
            )
    case.witness()

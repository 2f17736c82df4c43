"""Numerics: what every other property rests on. Finite answers, the same answer twice, inputs left alone."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from veriformer.properties.bench.guards import SubjectError, WrongOutputError
from veriformer.properties.bench.measured import judged_dtypes
from veriformer.properties.bench.pool import Built
from veriformer.properties.causes.tracing.localize import where_it_enters
from veriformer.properties.causes.tracing.ways import ways_part
from veriformer.properties.definitions.differences import size_of
from veriformer.properties.definitions.rounding import epsilon
from veriformer.properties.diagnosis.unsteady import READS, DropoutLines, reads_memory
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.premises import needs_part
from veriformer.properties.engine.property import holds
from veriformer.properties.engine.stream import SEQUENCES, Stream
from veriformer.properties.families.left_behind import masks_leave_nothing
from veriformer.properties.subject.inputs import Inputs, has_ordinary_inputs, ordinary
from veriformer.properties.subject.kinds import KINDS
from veriformer.properties.subject.layouts import LAYOUTS
from veriformer.properties.subject.paths import Path

_CALLABLE = tuple(kind for kind in KINDS if has_ordinary_inputs(kind))
_STEPS = 2.0**-5
"""Of the size of an output: some whole steps of numbers of eight bits, of 1/127 each."""
_LONGEST = 33  # one past the longest of the small models
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
    """Unit normal values, values a hundred times larger or smaller, zeros, subnormal numbers and a sequence that
    repeats one entry are ordinary. So is every length of the small models: what goes wrong at one of them alone (a
    remainder, a table that ends) is in none of the others.
    """
    built = case.built()
    if case.walks_all_paths and (unset := case.bench.pool.uninitialised(built.config)):
        _ask_of_values(case, unset)
    if case.walks_all_paths:
        _asks_for_no_memory(case, built)
    # float16 ends at 65504: the scores of inputs of 100 are out of its range, whatever the implementation
    large = () if built.dtype == torch.float16 else (100.0,)
    subnormal = torch.finfo(built.dtype).tiny / 4
    scale = case.choice("scale", (1.0, 0.01, *large, 0.0, subnormal))
    inputs = ordinary(case.subject, built.config, case.generator, built.dtype)
    tensors = [(x * scale if x.is_floating_point() else x).to(case.bench.device) for x in inputs.tensors]
    if case.flag("repeated"):
        tensors = [x[:, :1].expand_as(x).contiguous() if x.ndim > 1 else x for x in tensors]
    for path in case.paths(masks=("none",)):
        output = case.call(built, *tensors, *inputs.extras, path=path)
        case.finite(output, "an ordinary input gives NaN or infinity")
    if case.walks_all_paths and case.subject.kind in SEQUENCES:
        _every_length(case, built)
    case.witness()


def _asks_for_no_memory(case: Case, built: Built) -> None:
    """Fail where numbers are read that nothing has written: NaN on the day on which the memory holds one."""
    own = torch.Generator().manual_seed(0)  # whether it is asked is no part of the case
    drawn = ordinary(case.subject, built.config, own, built.dtype)
    call = case.caller(built, *[x.to(case.bench.device) for x in drawn.tensors], *drawn.extras)
    with suppress(SubjectError):  # it does not run where operators are watched
        case.require(
            ~case.apply(reads_memory, call),
            "the output depends on what memory held before",
            got="other outputs where torch.empty gives 0 and where it gives 1",
            expected="one output",
            cause=lambda: READS,
        )


def _ask_of_values(case: Case, unset: tuple[str, ...]) -> None:
    """Ask about parameters without a value, unless they are declared to get theirs elsewhere.

    What memory holds may be ordinary numbers on one day and NaN on the next; everything else is judged with values that
    are drawn for them.
    """
    case.require(
        case.subject.fact("init") == "other",
        f"{unset[0]} is never given a value",
        got=f"what the memory held, in {len(unset)} parameter{'s' * (len(unset) > 1)} after build",
        expected="a value",
        cause=lambda: f"{', '.join(unset[:3])}: made by torch.empty, or as Tensor(sizes), and not written since",
        asks=("init", "other"),
    )


def _every_length(case: Case, built: Built) -> None:
    """Call once at every length. Some lengths may be refused (all that end no block, say), but not one alone."""
    stream, bits = Stream(case, built), min(torch.finfo(built.dtype).bits, 32)  # many compute in float32 whatever it is
    most = min(built.config.max_len, case.subject.fact("max_len", built.config.max_len), _LONGEST)
    longest = case.longest_affordable(most)
    refused: dict[int, str] = {}
    for length in range(1, longest + 1):
        try:
            output = stream(stream.draw(2, length), path=Path(mask="none", mode="no_grad"))
        except WrongOutputError as problem:
            case.require(False, f"at length {length} {problem}", got="no tensor", expected="a tensor of numbers")
            return
        except SubjectError as problem:
            refused[length] = str(problem)
            continue
        case.require(
            output.is_complex() or (output.is_floating_point() and torch.finfo(output.dtype).bits >= bits),
            f"at length {length} the output is of {str(output.dtype).removeprefix('torch.')}",
            got=str(output.dtype),
            expected=f"a dtype of {bits} bits or more, as that of the model",
        )
        case.finite(output, f"at length {length} an ordinary input gives NaN or infinity")
    for length, why in refused.items():
        others = len(refused) > 1 or length in (1, longest)
        case.require(others, f"at length {length} alone {why}", got="an error", expected="an output")


@holds(
    "numerics.stateless",
    statement="The same call twice, with another call between, gives the same output.",
    formula="f(x) = f(x) after f(y)",
    source="Definition of a function; documented failures: dropout left on in eval, caches keyed on too little.",
    kinds=_CALLABLE,
    examples_factor=0.6,
    catches=("DR01", "RP08", "KV04"),
)
def calls_do_not_depend_on_one_another(case: Case) -> None:
    """In eval mode a subject is a function: no dropout, no state that one call leaves for the next, nor a mask."""
    built = case.built()
    first, other = (ordinary(case.subject, built.config, case.generator, built.dtype) for _ in range(2))
    for inputs in (first, other):
        inputs.tensors[:] = [x.to(case.bench.device) for x in inputs.tensors]
    before = case.call(built, *first.tensors, *first.extras).clone()
    shorter = case.subject.kind != "loss"  # its labels have the length of its logits
    case.call(
        built,
        *[x[..., :3] if shorter and x.ndim > 1 and not x.is_floating_point() else x for x in other.tensors],
        *other.extras,
    )
    after = case.call(built, *first.tensors, *first.extras)
    case.close(after, before, "the same call gives another output the second time", constants_allowed=True,
               cause=lambda: _state(case, built, first))  # fmt: skip
    masks_leave_nothing(case, built)
    case.witness()


@holds(
    "numerics.no-mutation",
    statement="The caller's tensors are unchanged by a call: what it is given, and what an earlier call gave.",
    formula="x before f(x) = x after f(x); f(x) before f(y) = f(x) after f(y)",
    source="torch convention: in-place functions end in an underscore.",
    kinds=_WITH_TENSORS,
)
def inputs_are_left_alone(case: Case) -> None:
    """Checked to the bit on every path, since a fast path can alter what the slow one leaves alone. An output belongs
    to the caller: a workspace that is written to again by the next call changes what is held of the one before.
    """
    built = case.built()
    inputs, others = (ordinary(case.subject, built.config, case.generator, built.dtype) for _ in range(2))
    for path in case.paths(masks=("none",)):
        given = [x.to(case.bench.device).clone() for x in inputs.tensors]
        kept = [x.clone() for x in given]
        output = case.call(built, *given, *inputs.extras, path=path).detach()  # of the same memory
        held = output.clone()
        case.call(built, *[x.to(case.bench.device) for x in others.tensors], *others.extras, path=path)
        case.require(
            ((output == held) | held.isnan()).all(),
            "the next call changed what this one gave",
            got="altered entries",
            expected="the output as it was returned",
            cause=lambda: (
                "the output is memory of the model's own, which every call writes to: a workspace, or a cache"
            ),
        )
        for number, (now, was) in enumerate(zip(given, kept, strict=True)):
            case.require(
                (now == was).all(),
                f"the call changed the caller's tensor (argument {number})",
                got="altered entries",
                expected="the tensor as it was given",
            )
    case.witness()


@holds(
    "numerics.grad-mode",
    statement="With gradients, without and in inference mode the output is the same, and finite.",
    formula="f_grad(x) = f_no_grad(x) = f_inference(x)",
    source="Fast paths are chosen by the mode: torch.nn.TransformerEncoderLayer, nn.MultiheadAttention.",
    kinds=_WITH_TENSORS,
)
def modes_of_autograd_agree(case: Case) -> None:
    """Whether a graph is recorded is no input of the function. Other kernels round otherwise, which quantised numbers
    may turn into whole steps.
    """
    built = case.built()
    inputs = ordinary(case.subject, built.config, case.generator, built.dtype)
    tensors = [x.to(case.bench.device) for x in inputs.tensors]
    expected, is_quantised = case.call(built, *tensors, *inputs.extras), bool(case.subject.fact("quantised"))
    for path in case.paths(masks=("none",)):
        got = case.call(built, *[x.clone() for x in tensors], *inputs.extras, path=path).clone()
        case.finite(got, f"in mode {path.mode} the output is NaN or infinite")
        if is_quantised and path.autocast:  # see numerics.autocast
            continue
        case.close(got, expected.detach(), f"in mode {path.mode} the output is another one", constants_allowed=True,
                   bound=_STEPS * size_of(expected) if is_quantised else None,
                   cause=partial(_parting, case, built, inputs, path))  # fmt: skip
    case.witness()


@holds(
    "numerics.strided",
    statement="How a tensor lies in memory does not matter: transposed, expanded, strided inputs give one output.",
    formula="f(x) = f(x') for equal values at other strides",
    source="documented bug BK01; a kernel that reads memory in order must ask for it.",
    kinds=_WITH_TENSORS,
    catches=("BK01",),
)
def strides_do_not_matter(case: Case) -> None:
    """The same values as every second entry of a larger tensor, as a transposed one, and as a batch that repeats one
    sample without copying it. A subject that refuses a layout with an error is right too.
    """
    built = case.built()
    inputs = ordinary(case.subject, built.config, case.generator, built.dtype)
    tensors = [x.to(case.bench.device) for x in inputs.tensors]
    form = case.choice("layout", LAYOUTS)
    if form == "expanded":
        tensors = [x[:1].repeat(len(x), *[1] * (x.ndim - 1)) if x.ndim > 1 else x for x in tensors]
    expected = case.call(built, *[x.contiguous() for x in tensors], *inputs.extras)
    try:
        got = case.call(built, *tensors, *inputs.extras, path=Path(layout=form))
    except SubjectError:
        case.witness()
        return
    case.close(got, expected, f"a {form} input gives another output than the same values in order",
               constants_allowed=True)  # fmt: skip
    case.witness()


@holds(
    "instances.isolated",
    statement="What one instance returns does not depend on which other instances exist or ran before.",
    formula="f_1(x) before = f_1(x) after f_2 was built and called",
    source="documented bugs RP07, RP08: module-level caches keyed on too little.",
    kinds=_CALLABLE,
    unless=needs_part("build"),
    catches=("RP07",),
)
def instances_do_not_share_state(case: Case) -> None:
    """The other instance has other sizes, and where the subject computes in it another dtype; an instance built after
    it must answer as the one built before.
    """
    built = case.built(dtype=judged_dtypes(case.bench)[0])
    inputs = ordinary(case.subject, built.config, case.generator, built.dtype)
    tensors = [x.to(case.bench.device) for x in inputs.tensors]
    before = case.call(built, *tensors, *inputs.extras).clone()
    others = [c for c in case.bench.configs if c != built.config] or [built.config]
    config = others[case.integer("other", 0, len(others) - 1)]
    if "d_model" not in case.subject.domain and case.flag("wider"):  # than any before: what is kept must be made anew
        config = replace(config, d_model=2 * max(c.d_model for c in case.bench.configs) * config.num_heads)
    other = case.bench.pool.fresh(config, judged_dtypes(case.bench)[-1])
    theirs = ordinary(case.subject, config, case.generator, other.dtype)
    case.call(other, *[x.to(case.bench.device) for x in theirs.tensors], *theirs.extras)
    case.close(case.call(built, *tensors, *inputs.extras), before,
               "an instance gives another output after another instance ran", constants_allowed=True)  # fmt: skip
    again = case.bench.pool.fresh(built.config, built.dtype)
    case.close(case.call(again, *tensors, *inputs.extras), before,
               "an instance built after another one ran gives another output than the one built before",
               constants_allowed=True)  # fmt: skip
    case.witness()


def _state(case: Case, built: Built, inputs: Inputs) -> str | None:
    """Tell dropout that acts in eval mode, a buffer that a call changes, and where two calls part."""

    def call() -> object:
        return case.call(built, *inputs.tensors, *inputs.extras)

    with DropoutLines() as watch:
        call()
    if watch.seen:
        return watch.told()
    if bool(reads_memory(case.caller(built, *inputs.tensors, *inputs.extras))):
        return READS
    if isinstance(built.module, nn.Module):
        before = {name: buffer.clone() for name, buffer in built.module.named_buffers()}
        call()
        changed = [n for n, b in built.module.named_buffers() if n in before and not torch.equal(b, before[n])]
        if changed:
            return f"a call changes the buffer {changed[0]}"
    where = where_it_enters(built.module, call, call, lambda t: t, 16 * epsilon(built.dtype))
    return f"two calls part {where}" if where else "a call leaves something behind that the next one reads"


def _parting(case: Case, built: Built, inputs: Inputs, path: Path) -> str | None:
    tensors = [x.to(case.bench.device) for x in inputs.tensors]

    def usual() -> object:
        return case.call(built, *tensors, *inputs.extras)

    def other() -> object:
        return case.call(built, *[x.clone() for x in tensors], *inputs.extras, path=path)

    ways = ways_part(usual, other, ("the usual way", f"that of {path}"))
    where = where_it_enters(built.module, usual, other, lambda t: t, case.tolerance(built))
    told = f"the modes part {where}" if where else "a fast path is taken in this mode"
    return f"{told}: {ways}" if ways else told

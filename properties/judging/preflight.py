"""What is found out before anything is judged: builds, can be called, is finite, repeats itself."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from veriformer.properties.bench.guards import SubjectError, SubjectTimeoutError, last_frames
from veriformer.properties.bench.measured import given_dtype
from veriformer.properties.bench.pool import REFUSALS
from veriformer.properties.bench.workbench import Workbench
from veriformer.properties.definitions.differences import size_of, worst_difference
from veriformer.properties.definitions.rounding import epsilon
from veriformer.properties.diagnosis.unsteady import reads_memory
from veriformer.properties.subject.inputs import Inputs, has_ordinary_inputs, ordinary
from veriformer.properties.subject.kinds import SEQUENCE_KINDS
from veriformer.properties.subject.raised import told

_LONGER = (8, 16, 32, 64)
"""Lengths tried where ordinary sequences of five raise; below one that works the shortest is looked for."""


@dataclass
class Preflight:
    """What the first calls showed.

    Attributes:
        error: why nothing can be judged, or "".
        timed_out: whether that was a hang.
        broken: ids of the prerequisites that do not hold; every other property is blocked by them.
    """

    error: str = ""
    timed_out: bool = False
    broken: list[str] = field(default_factory=list)


def preflight(bench: Workbench) -> Preflight:
    """Build the smallest model and call it twice on ordinary inputs."""
    if not has_ordinary_inputs(bench.subject.kind):
        return Preflight()
    try:
        dtype = bench.settings.dtypes[0] if bench.settings.dtypes else given_dtype(bench)
        built = bench.pool.get(bench.configs[0], dtype)
        inputs = ordinary(bench.subject, built.config, torch.Generator().manual_seed(0), dtype)
        inputs.tensors[:] = [x.to(bench.device) for x in inputs.tensors]
        kept = [x.clone() for x in inputs.tensors]
        first = bench.forward(built, *inputs.tensors, *inputs.extras)
        _insist_on_shape(first, inputs, bench.subject.kind)
        broken = []
        if any(not torch.equal(a, b) for a, b in zip(inputs.tensors, kept, strict=True)):
            broken.append("numerics.no-mutation")
        if not bool(first.isfinite().all()):
            return Preflight(broken=[*broken, "numerics.finite"])
        again = bench.forward(built, *kept, *inputs.extras)
        if first.shape != again.shape or (
            worst_difference(again, first, size_of(first)).error > 16 * epsilon(first.dtype)
        ):
            of_memory = bool(reads_memory(lambda: bench.forward(built, *kept, *inputs.extras)))
            broken.append("numerics.finite" if of_memory else "numerics.stateless")
        return Preflight(broken=broken)
    except SubjectTimeoutError as problem:
        return Preflight(error=str(problem), timed_out=True)
    except SubjectError as problem:
        return Preflight(error=str(problem) + _takes_longer(bench))
    except ValueError as problem:
        if last_frames(problem):  # an output of a type of the user's own may raise wherever it is looked at
            raise
        return Preflight(error=str(problem))


def _takes_longer(bench: Workbench) -> str:
    """Return what to declare where longer sequences work, and the one that raised is shorter than all of them."""
    subject = bench.subject
    if subject.kind not in SEQUENCE_KINDS or "min_length" in subject.declares:
        return ""
    try:
        built = bench.pool.get(bench.configs[0], given_dtype(bench))
    except SubjectError:
        return ""

    def works(length: int) -> bool:
        longer = subject.with_facts(min_length=length)
        inputs = ordinary(longer, built.config, torch.Generator().manual_seed(0), built.dtype)
        try:
            bench.forward(built, *[x.to(bench.device) for x in inputs.tensors], *inputs.extras)
        except SubjectError:
            return False
        return True

    try:  # a subject that raises whatever it is given is asked four times, not sixty
        long = next((n for n in _LONGER if works(n)), 0)
        shortest = next((n for n in range(max(6, long // 2 + 1), long) if works(n)), long)
    except SubjectTimeoutError:
        return ""
    if not long:
        return ""
    return f"; sequences of {shortest} work: declare min_length={shortest} if it takes no shorter ones by design"


def _as_another(output: torch.Tensor, inputs: Inputs, kind: str) -> str:
    """Return what to say where one answer a sample comes, not one a position."""
    is_pooled = kind in ("encoder", "decoder") and output.ndim == 2 and len(output) == len(inputs.tensors[0])
    return "; what gives [B, classes] is --kind classifier, or Subject(kind='classifier', ...)" if is_pooled else ""


def _insist_on_shape(output: torch.Tensor, inputs: Inputs, kind: str) -> None:
    fits = output.ndim == len(inputs.shape) and all(
        want is None or want == got for want, got in zip(inputs.shape, output.shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("*" if n is None else str(n) for n in inputs.shape)
        given = ", ".join(str(list(x.shape)) for x in inputs.tensors)
        raise SubjectError(
            f"forward returned shape {list(output.shape)} for inputs {given or 'of numbers'}; "
            f"{'an' if kind[0] in 'aeiou' else 'a'} {kind} returns [{wanted}] here{_as_another(output, inputs, kind)}"
        )
    if not (output.is_floating_point() or output.is_complex()):
        raise SubjectError(f"forward returned {output.dtype} where floating point numbers are required")


def lengths_are_equal(bench: Workbench) -> str:
    """Say that a relative bias refuses other numbers of keys than of queries; empty where it takes them, or breaks."""
    if bench.subject.kind != "position_bias" or bench.subject.fact("equal_lengths") is not None:
        return ""
    built = bench.pool.get(bench.configs[0], torch.float32)
    try:
        bench.forward(built, 4, 6)
    except SubjectError as problem:
        refusal = problem.__cause__
        if not isinstance(refusal, REFUSALS):
            return ""
    else:
        return ""
    try:
        bench.forward(built, 5, 5)
    except SubjectError:
        return ""
    return f"equal_lengths = True: it raises {told(refusal)} where queries and keys differ in number; declare it"

"""Proof, in every run, that the run can fail: faults put into the user's own subject, which must be noticed.

A fault wraps the subject's `forward` (`fault_outside`), intercepts its calls of torch or works on a copy of the model
(`fault_inside`); the user's object is never altered. To add a fault, add one row to `FAULTS`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from veriformer.properties.bench.guards import SubjectError, SubjectTimeoutError
from veriformer.properties.bench.isolation import isolated
from veriformer.properties.bench.measured import computes_alike, judged_dtypes, tolerance_of
from veriformer.properties.bench.workbench import Workbench
from veriformer.properties.definitions.rounding import GAP
from veriformer.properties.engine.property import Property
from veriformer.properties.engine.searching.search import Search
from veriformer.properties.engine.stream import PER_POSITION, SEQUENCES
from veriformer.properties.engine.violations import BudgetSpent, NotSpokenOfError, Violation
from veriformer.properties.power import inside, outside
from veriformer.properties.power.injection import Wrap
from veriformer.properties.subject.subject import Subject

SHARE = 0.05  # of the wrong term in the output, or three times what rounding may do in a coarse dtype


@dataclass(frozen=True)
class Fault:
    """One way to break a subject.

    Attributes:
        name: what is broken, in words.
        noticed_by: ids of properties that must notice; those that apply are asked in this order.
        matters: what it would mean if this went unnoticed.
        fits: whether the fault makes sense for a subject.
        wrap: makes the broken forward of the right one.
    """

    name: str
    noticed_by: tuple[str, ...]
    matters: str
    fits: Callable[[Subject], bool]
    wrap: Wrap


def _causal(subject: Subject) -> bool:
    return subject.kind in PER_POSITION and subject.fact("causal") is True


def _padded(subject: Subject) -> bool:
    # right padding lies in the future of a causal model, which does not look there anyway
    looks_there = not subject.fact("causal") or subject.fact("padding_side", "both") in ("left", "both")
    return (
        subject.kind in SEQUENCES
        and subject.takes_mask("padding")
        and (looks_there or subject.kind == "encoder_decoder")
    )


def _both_ways(subject: Subject) -> bool:
    return subject.fact("causal") is not True and subject.kind in SEQUENCES


_FUTURE = ("causality.no-future-influence", "causality.no-future-gradient", "causality.prefix-consistency")
_PADDING = ("padding.content-irrelevant", "padding.amount-irrelevant", "padding.every-position-hides")
_LEAK = "a model that reads ahead in training has nothing to read ahead when it generates"

FAULTS: dict[str, Fault] = {
    fault.name: fault
    for fault in (
        Fault("the future leaks in by one position", _FUTURE, _LEAK, _causal, outside.future_by_one),
        Fault("the last position leaks into every output, its gradient cut", _FUTURE[::2], _LEAK, _causal,
              outside.last_everywhere),
        Fault("inside attention the mask leaks by one key", _FUTURE, _LEAK, _causal, inside.mask_leaks_by_one),
        Fault("inside attention the causal mask is dropped", _FUTURE, _LEAK, _causal, inside.mask_dropped),
        Fault("the padding mask is ignored", _PADDING, "outputs then depend on how long the batch's longest sample is",
              _padded, outside.mask_ignored),
        Fault("the scores of attention are not scaled", ("attention.definition", "attention.score-variance"),
              "attention saturates and learns badly, and nothing looks wrong",
              lambda s: s.fact("attention_scale") is None and not s.fact("query_key_norm"), inside.scale_dropped),
        Fault("scores are divided by sqrt(d_model) in place of sqrt(d_head)",
              ("attention.model-scale", "attention.definition", "attention.score-variance"),
              "attention is blurred the more heads there are, and nothing looks wrong",
              lambda s: s.fact("attention_scale") is None and not s.fact("query_key_norm"), inside.scale_of_the_model),
        Fault("the residual connection is dropped", ("residual.identity", "residual.placement", "residual.jacobian"),
              "deep stacks without it do not train",
              lambda s: s.kind == "layer" and s.fact("norm_placement") == "pre", outside.skip_dropped),
        Fault("the norms act over positions in place of channels", (*_FUTURE[::2], *_PADDING, "norm.per-token"),
              "each token then depends on all the others, the future and the padding among them",
              lambda s: _causal(s) or _padded(s) or s.kind == "norm", inside.norm_over_time),
        Fault("positions are removed", ("permutation.broken-by-positions", "positions.order-matters"),
              "without order a sentence is a bag of words",
              lambda s: _both_ways(s) and s.fact("positions") not in (None, "none"), inside.positions_removed),
        Fault("samples of a batch are mixed", ("batch.independence", "batch.permutation"),
              "answers to one user then depend on what others ask",
              lambda s: s.kind in SEQUENCES and not s.fact("batch_coupled", False), outside.batch_mixed),
        Fault("dropout is left on in eval", ("numerics.stateless", "dropout.eval-deterministic"),
              "answers then change from call to call", lambda s: not s.is_functional, outside.dropout_left_on),
        Fault("positions are mixed into a position-free model", ("permutation.equivariance",),
              "a set would be read as a sequence",
              lambda s: s.kind in PER_POSITION and s.fact("positions") == "none", outside.order_mixed_in),
    )
}  # fmt: skip
"""Every fault that can be put into a subject, by its name; plug-ins add theirs."""


def broken_by(fault: Fault, subject: Subject) -> Subject:
    """Return a subject with a fault put into it: a broken model for the kill matrix, of a right one.

    Raises:
        ValueError: the subject has no `forward` to break.
    """
    if subject.forward is None:
        raise ValueError(f"{subject.name} has no forward; the fault {fault.name!r} breaks one")
    return replace(subject, forward=fault.wrap(subject.forward, SHARE).forward, embed=None)


def power(bench: Workbench, properties: Sequence[Property]) -> dict[str, Any] | None:
    """Break the subject in every way that fits, and see whether the properties of this run notice.

    Args:
        bench: of the right subject, its facts resolved; its models are reused.
        properties: those of the run.

    Returns:
        `{"noticed": k, "tried": n, "missed": [names], "faults": [{"name", "noticed_by", "matters"}]}`; None if no fault
        fits the run. A fault that finds nothing to take hold of (a kernel that cannot be intercepted) is not counted.
    """
    faults: list[dict[str, Any]] = []
    quick = replace(bench.settings, profile="quick")
    for fault in FAULTS.values():
        judges = {p.id: p for p in properties if p.id in fault.noticed_by and p.why_not(bench.subject) is None}
        if not judges or bench.subject.forward is None or not fault.fits(bench.subject):
            continue
        injected = fault.wrap(bench.subject.forward, _share(bench))
        broken = replace(bench.subject, forward=injected.forward, embed=None)
        with isolated(bench.subject.module):
            beside = Workbench(broken, quick, bench.pool)
            computes_alike(beside, bench)
            noticed = next((i for i in fault.noticed_by if i in judges and _notices(judges[i], beside)), None)
        if injected.took_hold:
            faults.append({"name": fault.name, "noticed_by": noticed, "matters": fault.matters})
    if not faults:
        return None
    missed = [f["name"] for f in faults if f["noticed_by"] is None]
    return {"noticed": len(faults) - len(missed), "tried": len(faults), "missed": missed, "faults": faults}


def _share(bench: Workbench) -> float:
    coarse = [dtype for dtype in judged_dtypes(bench) if 3 * GAP[dtype] > SHARE]  # no other rounds as far as that
    tolerances = [
        tolerance_of(bench, bench.pool.get(config, dtype)) for config in bench.buildable() for dtype in coarse
    ]
    return max([SHARE, *(3 * tolerance for tolerance in tolerances)])


def _notices(prop: Property, bench: Workbench) -> bool:
    try:
        found = Search(prop, bench, shrink=False).run()
    except (BudgetSpent, SubjectTimeoutError, SubjectError, NotSpokenOfError):
        return False
    return found is not None and isinstance(found.problem, Violation)

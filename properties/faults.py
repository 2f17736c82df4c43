"""Proof, in every run, that the run can fail: faults put into the user's own subject, which must be noticed.

A fault wraps the subject's `forward`; the model itself is never altered. To add a fault, add one row to `FAULTS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from veriformer.properties.isolation import isolated
from veriformer.properties.property import Property
from veriformer.properties.search import Search
from veriformer.properties.stream import PER_POSITION, SEQUENCES
from veriformer.properties.subject import Subject
from veriformer.properties.violations import BudgetSpent, SubjectError, SubjectTimeoutError, Violation
from veriformer.properties.workbench import Workbench

SHARE = 0.05  # of the wrong term in the output, or three times what rounding may do in a coarse dtype

Forward = Callable[..., Tensor]


@dataclass(frozen=True)
class Fault:
    """One way to break a subject from outside.

    Attributes:
        name: what is broken, in words.
        noticed_by: ids of properties that must notice; the first that applies is asked.
        fits: whether the fault makes sense for a subject.
        wrap: makes the broken forward of the right one.
    """

    name: str
    noticed_by: tuple[str, ...]
    fits: Callable[[Subject], bool]
    wrap: Callable[[Forward, float], Forward]


def _future_by_one(forward: Forward, share: float) -> Forward:
    def broken(model: Any, *args: Any, **kwargs: Any) -> Tensor:
        output = forward(model, *args, **kwargs)
        ahead = torch.cat([output[:, 1:], output[:, -1:]], dim=1)
        return output + share * ahead

    return broken


def _past_only_last(forward: Forward, share: float) -> Forward:
    def broken(model: Any, *args: Any, **kwargs: Any) -> Tensor:
        output = forward(model, *args, **kwargs)
        return output + share * output[:, -1:].detach()

    return broken


def _mask_ignored(forward: Forward, share: float) -> Forward:
    def broken(model: Any, *args: Any, **kwargs: Any) -> Tensor:
        kept = {k: None if k in _MASKS else v for k, v in kwargs.items()}
        return forward(model, *args, **{k: v for k, v in kept.items() if v is not None})

    return broken


_MASKS = ("attention_mask", "source_mask", "target_mask", "memory_mask")


def _batch_mixed(forward: Forward, share: float) -> Forward:
    def broken(model: Any, *args: Any, **kwargs: Any) -> Tensor:
        output = forward(model, *args, **kwargs)
        return output + share * output.roll(1, dims=0)

    return broken


def _noise(forward: Forward, share: float) -> Forward:
    def broken(model: Any, *args: Any, **kwargs: Any) -> Tensor:
        # dropout that eval mode does not switch off; half of the entries, so that few entries differ between calls too
        return torch.nn.functional.dropout(forward(model, *args, **kwargs), 0.5)

    return broken


def _order_mixed_in(forward: Forward, share: float) -> Forward:
    def broken(model: Any, *args: Any, **kwargs: Any) -> Tensor:
        output = forward(model, *args, **kwargs)
        steps = torch.arange(output.shape[1], dtype=output.dtype, device=output.device)
        return output + share * output.abs().mean() * steps[None, :, None]

    return broken


FAULTS: Mapping[str, Fault] = {
    fault.name: fault
    for fault in (
        Fault(
            "the future leaks in by one position",
            ("causality.no-future-influence", "causality.no-future-gradient"),
            lambda s: s.kind in PER_POSITION and s.fact("causal") is True,
            _future_by_one,
        ),
        Fault(
            "the last position leaks into every output, its gradient cut",
            ("causality.no-future-influence",),
            lambda s: s.kind in PER_POSITION and s.fact("causal") is True,
            _past_only_last,
        ),
        Fault(
            "the padding mask is ignored",
            ("padding.content-irrelevant",),
            # right padding lies in the future of a causal model, which does not look there anyway
            lambda s: (
                s.kind in SEQUENCES
                and s.takes_mask("padding")
                and (not s.fact("causal") or s.fact("padding_side") in ("left", "both") or s.kind == "encoder_decoder")
            ),
            _mask_ignored,
        ),
        Fault(
            "samples of a batch are mixed",
            ("batch.independence", "batch.permutation"),
            lambda s: s.kind in SEQUENCES and not s.fact("batch_coupled", False),
            _batch_mixed,
        ),
        Fault("dropout is left on in eval", ("numerics.stateless",), lambda s: not s.is_functional, _noise),
        Fault(
            "positions are mixed into a position-free model",
            ("permutation.equivariance",),
            lambda s: s.kind in PER_POSITION and s.fact("positions") == "none",
            _order_mixed_in,
        ),
    )
}
"""Every fault that can be put into a subject from outside."""


def power(bench: Workbench, properties: Sequence[Property]) -> dict[str, Any] | None:
    """Break the subject in every way that fits, and see whether the properties of this run notice.

    Args:
        bench: of the right subject, its facts resolved; its models are reused.
        properties: those of the run.

    Returns:
        `{"noticed": k, "tried": n, "missed": [...], "voided": bool}`; None if no fault fits the run. A run
        is voided when a fault went unnoticed that its own properties promise to notice.
    """
    missed: list[str] = []
    tried = 0
    for fault in FAULTS.values():
        judges = [p for p in properties if p.id in fault.noticed_by and p.why_not(bench.subject) is None]
        if not judges or bench.subject.forward is None or not fault.fits(bench.subject):
            continue
        tried += 1
        broken = replace(bench.subject, forward=fault.wrap(bench.subject.forward, _share(bench)), embed=None)
        with isolated(bench.subject.module):
            if not any(_notices(prop, Workbench(broken, bench.settings, bench.pool)) for prop in judges):
                missed.append(fault.name)
    if not tried:
        return None
    return {"noticed": tried - len(missed), "tried": tried, "missed": missed, "voided": bool(missed)}


def _share(bench: Workbench) -> float:
    coarsest = max(
        bench.tolerance(bench.pool.get(config, dtype)) for config in bench.configs for dtype in bench.dtypes()
    )
    return max(SHARE, 3 * coarsest)


def _notices(prop: Property, bench: Workbench) -> bool:
    try:
        found = Search(prop, bench, shrink=False).run()
    except (BudgetSpent, SubjectTimeoutError, SubjectError):
        return False
    return found is not None and isinstance(found.problem, Violation)

"""What is seen of a model's structure where a closed form does not hold: whether it is the textbook's at all.

A parameter that the textbook's model does not have, beside all that it has, and on which the output depends, is a part
by design: a relative table, a gate, a gain. One that stands in place of what the textbook has may be a size that was
ignored, and one that nothing reads is a defect: both leave the closed form to be asked about.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from veriformer.properties.bench.pool import Built
from veriformer.properties.definitions.costs.counts import fewest, possible_counts
from veriformer.properties.definitions.costs.flops import expected_weights
from veriformer.properties.definitions.costs.inventory import (
    ATTENTION,
    FEED_FORWARD,
    OTHER,
    inventory,
    remade_weights,
)
from veriformer.properties.engine.case import Case
from veriformer.properties.probes.sizes.own_sizes import sizes_of
from veriformer.properties.subject.inputs import ordinary


def beside_the_textbook(case: Case, *, matrices: bool = False) -> str | None:
    """Return what shows that a model is not the textbook's; None where all that is seen is, or may be, a defect.

    Args:
        case: of the violation; looked at in all sizes, so that its cases agree.
        matrices: more matrices than the textbook's, of whatever shape, show it, too.
    """
    if case.subject.fact("structure") == "textbook":
        return None
    key = ("beside the textbook", matrices)
    if key not in case.bench.measured:
        with off_the_record(case):
            case.bench.measured[key] = next(_signs(case, matrices), None)
    seen: str | None = case.bench.measured[key]
    return seen


def is_of_textbook_shapes(case: Case, built: Built) -> bool:
    """Return whether every parameter has a shape that the textbook's model has, or the structure is declared."""
    if case.subject.fact("structure") == "textbook":
        return True
    return not inventory(built.module, case.subject, sizes_of(case.bench, built)).others


def unlike_the_textbook(case: Case, built: Built) -> str | None:
    """Name a parameter whose shape the textbook's model does not have."""
    others = inventory(built.module, case.subject, sizes_of(case.bench, built)).others
    if not others:
        return None
    with off_the_record(case):
        unread = set(unread_parameters(case, built))
    name, shape = next(((n, s) for n, s in others.items() if n in unread), next(iter(others.items())))
    if name in unread:
        return f"{name} of shape {shape} is there besides, and the output does not depend on it"
    return f"{name} has the shape {shape}, which no part of the textbook's {case.subject.kind} has at these sizes"


def _signs(case: Case, matrices: bool) -> Iterator[str]:
    subject = case.subject
    for drawn in case.bench.buildable():
        built = case.bench.pool.get(drawn, torch.float32)
        if not isinstance(built.module, nn.Module):
            return
        if told := remade_weights(built.module):
            yield told
        config = sizes_of(case.bench, built)
        found = inventory(built.module, subject, config)
        if not found.others and not matrices:
            continue
        found = inventory(built.module, subject, config, unread_parameters(case, built))
        of = f"the textbook's {subject.kind}"
        volumes = found.volumes
        if matrices:
            wanted = expected_weights(subject, config)
            own = {sort: volumes.get(sort, 0) for sort in wanted}
            if FEED_FORWARD not in wanted:  # there is no width that could have been ignored
                own[ATTENTION] += sum(math.prod(shape) for shape in found.others.values() if len(shape) > 1)
            complete = all(own[sort] >= wanted[sort] for sort in wanted)
            if complete and sum(own.values()) > sum(wanted.values()):
                yield f"its matrices hold {sum(own.values()):,} weights, those of {of} {sum(wanted.values()):,}"
        else:
            complete = found.volume - volumes.get(OTHER, 0) >= min(map(fewest, possible_counts(subject, config)))
        if complete and found.others:
            name, shape = next(iter(found.others.items()))
            yield f"{name} has the shape {shape}, which no part of {of} has"


def unread_parameters(case: Case, built: Built) -> list[str]:
    """Return the names of the parameters that the output does not depend on; none where no gradient can be had."""
    inputs = ordinary(case.subject, built.config, torch.Generator().manual_seed(0), built.dtype)
    with torch.enable_grad():
        output = case.bench.forward(built, *[x.to(case.bench.device) for x in inputs.tensors], *inputs.extras)
    module = built.module
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    if not output.requires_grad or not named:
        return []
    weight = torch.arange(1, output.numel() + 1, device=output.device).reshape(output.shape).sin()
    total = (output * weight).sum()
    gradients = torch.autograd.grad(total, [p for _, p in named], allow_unused=True)
    return [name for (name, _), g in zip(named, gradients, strict=True) if g is None]


@contextmanager
def off_the_record(case: Case) -> Iterator[None]:
    """Look at models that a script of the failure has no need of."""
    recorder, case.bench.recorder = case.bench.recorder, None
    try:
        yield
    finally:
        case.bench.recorder = recorder

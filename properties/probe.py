"""Facts that a subject did not declare, found out by calling it; reported, and used in place of a declaration."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from veriformer.properties.case import Case
from veriformer.properties.compare import size_of, worst_difference
from veriformer.properties.draws import RandomDraws
from veriformer.properties.observed_scale import ObservedScale, ScaleWatch
from veriformer.properties.paths import DEFAULT, Path
from veriformer.properties.stream import PER_POSITION, SEQUENCES, Stream
from veriformer.properties.violations import SubjectError
from veriformer.properties.workbench import Workbench

_ORDERED = tuple(kind for kind in SEQUENCES if kind != "cross_attention")
LENGTH = 6  # long enough to tell one step ahead from all steps ahead, short enough for any window or table


def probe(bench: Workbench) -> tuple[dict[str, Any], list[str]]:
    """Find out whether a subject is causal and whether it has positions, where it does not say so.

    Returns:
        The facts found, and one sentence each for the report.
    """
    subject = bench.subject
    facts: dict[str, Any] = {}
    notes: list[str] = []
    try:
        if subject.kind in PER_POSITION and subject.fact("causal") is None:
            influence = _influence(bench)
            if influence is not None:
                facts["causal"] = not bool(influence.triu(1).any())
                notes.append(_causal_note(influence))
        causal = facts.get("causal", subject.fact("causal"))
        if subject.kind in _ORDERED and subject.fact("positions") is None and not causal:
            facts["positions"] = found = "none" if _ignores_order(bench) else "other"
            manner = "does not depend on" if found == "none" else "depends on"
            notes.append(f"positions = {found!r}: the output {manner} the order of the input; declare it")
        if subject.kind in SEQUENCES and not subject.is_functional:
            scales = _scales(bench)
            facts["observed_scale"] = bool(scales)
            if scales and subject.fact("attention_scale") is None:
                notes += _scale_notes(scales)
    except SubjectError:
        pass  # the properties will meet the same error, on a case that can be shown
    return facts, notes


def _case(bench: Workbench) -> tuple[Case, Stream]:
    dtype = bench.dtypes()[-1]
    case = Case(bench, RandomDraws(0, {"config": 0, "dtype": str(dtype).removeprefix("torch.")}))
    return case, Stream(case, case.built(dtype=dtype))


def _influence(bench: Workbench) -> Tensor | None:
    """Return `[T, T]`: what reaches what, by gradients or else by substitution; exact zeros where nothing does."""
    _, stream = _case(bench)
    x = stream.draw(1, LENGTH)
    found = stream.influence(x)
    return found.cpu() if found is not None else by_substitution(stream, x)


def by_substitution(stream: Stream, x: Tensor, attention_mask: Tensor | None = None, path: Path = DEFAULT) -> Tensor:
    """Return `[T, T]`: entry (t, s) is the change of output t when input s is replaced; rounding counts as 0.

    Args:
        stream: the subject.
        x: one sequence `[1, T]` or `[1, T, D]`.
        attention_mask: `[1, T]`.
        path: the way to call.
    """
    length = x.shape[1]
    changed = x.repeat(length, *(1,) * (x.ndim - 1))
    other = stream.other(changed)
    each = torch.arange(length)
    changed[each, each] = other[each, each]
    with torch.no_grad():
        many = None if attention_mask is None else attention_mask.expand(length, -1)
        base, moved = stream(x, attention_mask, path=path), stream(changed, many, path=path)
    change = (moved - base).abs().amax(dim=-1).T.double().cpu()
    return torch.where(change <= stream.case.tolerance(stream.built) * size_of(base), torch.zeros_like(change), change)


def _ignores_order(bench: Workbench) -> bool:
    case, stream = _case(bench)
    x = stream.draw(1, LENGTH)
    if not x.is_floating_point():
        x = torch.arange(LENGTH, device=x.device)[None] % case.config().vocab_size
    order = [2, 0, 5, 1, 4, 3]
    with torch.no_grad():
        straight, permuted = stream(x), stream(x[:, order])
    expected = straight[:, order] if stream.case.subject.kind in PER_POSITION else straight
    return worst_difference(permuted, expected, size_of(expected)).error <= case.tolerance(stream.built)


def _scales(bench: Workbench) -> list[ObservedScale]:
    _, stream = _case(bench)
    with ScaleWatch() as watch, torch.no_grad():
        stream(stream.draw(2, LENGTH))
    return watch.found


def _scale_notes(scales: list[ObservedScale]) -> list[str]:
    """Report scales other than the usual one; that one needs no word."""
    unusual = {s for s in scales if abs(s.factor * s.d_head**0.5 - 1) > 1e-3}
    told = {
        f"attention_scale = {s.factor:.4g} at d_head = {s.d_head}, where 1/sqrt(d_head) is {s.d_head**-0.5:.4g} "
        "(1 if the queries were scaled before); declare it"
        for s in unusual
    }
    return sorted(told)


def _causal_note(influence: Tensor) -> str:
    ahead = {int(s - t) for t, s in influence.triu(1).nonzero().tolist()}
    if not ahead:
        return "causal = True: no output depends on a later input; declare it"
    if ahead == {1}:
        return (
            "causal = False: outputs depend on the input exactly one step ahead and on no later one; "
            "if the subject is meant to be causal, its mask is off by one: declare causal=True to have it judged"
        )
    if max(ahead) < LENGTH - 1:
        return f"causal = False: outputs depend on inputs up to {max(ahead)} steps ahead; declare it"
    return "causal = False: outputs depend on all later inputs; declare it"

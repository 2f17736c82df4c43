"""Which positions of a model without positions give another output than the others, where all inputs are equal."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from veriformer.properties.causes.structure import off_the_record
from veriformer.properties.diagnosis.places.batches import Batches, batches_of, longest
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.violations import Violation

_LONGEST = 20
"""Beyond the usual chunks of small tests (4, 8, 16)."""


def odd_positions(case: Case, problem: Violation | None = None) -> str | None:
    """Say which positions are treated otherwise than the rest, and at which lengths; None where that follows no rule.

    Args:
        case: of the violation, on whose sizes the subject is measured anew.
        problem: the violation; what is measured does not depend on it.
    """
    with off_the_record(case):
        for batches in batches_of(case):
            if batches.side != "target" or not batches.per_position or batches.tokenwise:
                continue
            if case.subject.fact("positions") == "none":
                one = batches.draw(1, 1)
                classes = _classes(case, batches, one, batches.together)
                return None if classes is None else _rule(classes)
            return _in_a_part(case, batches)
    return None


def _classes(case: Case, batches: Batches, one: Tensor, call: Callable[[Tensor], Tensor]) -> list[list[int]] | None:
    """Return for each length from 1 on which class of equal outputs each position is in, numbered as they come."""
    found = []
    for length in range(1, min(_LONGEST, longest(case)) + 1):
        out = call(one.expand(1, length, *one.shape[2:]).contiguous())
        if out.ndim != 3 or out.shape[:2] != (1, length):
            return None
        same = (out[0, :, None] - out[0, None]).abs().amax(-1) <= batches.limit(out)
        first = same.long().argmax(1).tolist()
        numbers = {place: number for number, place in enumerate(dict.fromkeys(first))}
        found.append([numbers[place] for place in first])
    return found


def _in_a_part(case: Case, batches: Batches) -> str | None:
    """Name the innermost part that, called by itself on equal inputs, leaves positions out."""
    module = batches.built.module
    if not isinstance(module, nn.Module):
        return None
    parts = [(name, part) for name, part in module.named_modules() if name and not isinstance(part, nn.ModuleList)]
    width = batches.built.config.d_model
    one = torch.randn(1, 1, width, generator=batches.generator, dtype=torch.float64)
    one = one.to(case.bench.device, batches.built.dtype)
    met = set()
    for name, part in reversed(parts):
        if type(part) in met or type(part).__module__.startswith("torch."):
            continue
        met.add(type(part))
        for more in ((), (None,)):
            try:
                with torch.no_grad():
                    classes = _classes(case, batches, one, lambda x, part=part, more=more: part(x, *more))  # type: ignore[misc]
            except Exception:  # it takes something else
                continue
            uneven = [n for n, own in enumerate(classes or (), 1) if len(set(own)) > 1]
            told = _tail(classes, uneven) if classes and uneven else None
            if told:
                return f"in {name} ({type(part).__name__}), called by itself on equal inputs at all positions, {told}"
            break
    return None


def _rule(classes: list[list[int]]) -> str | None:
    most = len(classes)
    uneven = [n for n, own in enumerate(classes, 1) if len(set(own)) > 1]
    if not uneven or most < 6:
        return None
    told = _tail(classes, uneven) or _periodic(classes) or _ends(classes, uneven)
    return f"with equal inputs at all positions, {told}" if told else None


def _tail(classes: list[list[int]], uneven: list[int]) -> str | None:
    """Tell the positions of an incomplete last chunk."""
    most = len(classes)
    for size in range(2, most // 2 + 1):
        for least in (size, 2 * size):
            wanted = [n for n in range(1, most + 1) if n > least and n % size]
            if uneven != wanted or not all(_two(classes[n - 1], n // size * size) for n in wanted):
                continue
            n = next((n for n in wanted if n % size > 1), wanted[0])
            rest = list(range(n // size * size, n))
            which = f"position {rest[0]} is" if len(rest) == 1 else f"positions {rest[0]} to {rest[-1]} are"
            return (
                f"at every length above {least} that is no multiple of {size}, the positions of the incomplete last "
                f"chunk of {size}, from floor(T / {size}) * {size} on, come out otherwise than the rest (of {n} "
                f"{which} different): the remainder is left out, or treated otherwise than whole chunks"
            )
    first = uneven[0]
    if first > 2 and uneven == list(range(first, most + 1)) and all(_two(classes[n - 1], first - 1) for n in uneven):
        return f"positions from {first - 1} on come out otherwise than those before, at every length above {first - 1}"
    return None


def _two(own: list[int], start: int) -> bool:
    """Whether all positions before one are alike, and none from it on is like them."""
    return len(set(own[:start])) == 1 and own[0] not in own[start:]


def _periodic(classes: list[list[int]]) -> str | None:
    own = classes[-1]
    for size in range(2, len(own) // 2 + 1):
        if all(
            classes[n - 1][t] == classes[n - 1][t - size] for n in range(size + 1, len(own) + 1) for t in range(size, n)
        ):
            alone = [place for place in range(size) if own[:size].count(own[place]) == 1]
            rest = len(set(own[:size])) == 2 and len(alone) == 1 and size > 2
            if rest:
                return f"every position t with t mod {size} = {alone[0]} comes out otherwise than the rest"
            return f"outputs depend on t mod {size}: position t + {size} gives what position t gives"
    for size in range(2, len(own) // 2 + 1):
        if all(own[t] == own[t // size * size] for t in range(len(own))) and len(set(own)) > 1:
            count = len(set(own))
            if count == -(-len(own) // size):
                return f"outputs are alike within each block of {size} positions and differ from block to block"
    return None


def _ends(classes: list[list[int]], uneven: list[int]) -> str | None:
    """Tell positions near the start, or near the end, at every length that is long enough."""
    most = len(classes)
    start, end = _edges(classes[-1])
    if start is None or end is None or start + end > most // 2 or not start + end:
        return None
    for n in range(2 * (start + end) + 2, most + 1):
        if _edges(classes[n - 1]) != (start, end):
            return None
    at = []
    if start:
        at.append(f"the first {start}" if start > 1 else "the first")
    if end:
        at.append(f"the last {end}" if end > 1 else "the last")
    plural = len(at) > 1 or start + end > 1
    told = f"{' and '.join(at)} position{'s' if plural else ''} come{'' if plural else 's'} out otherwise than the rest"
    edge = ", as at the edges of a convolution or window" if start and end else ""
    return f"{told}, which are alike{edge}"


def _edges(own: list[int]) -> tuple[int | None, int | None]:
    """Return how many positions at the start and at the end differ from the one in the middle; None where others do."""
    middle = own[len(own) // 2]
    alike = torch.tensor([c == middle for c in own]).nonzero().flatten().tolist()
    if len(alike) != alike[-1] - alike[0] + 1:
        return None, None
    return alike[0], len(own) - 1 - alike[-1]

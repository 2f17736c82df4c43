"""Why a reordered cache goes on with the wrong past: whose keys, whose values, whose mask."""

from __future__ import annotations

import torch
from torch import Tensor

from veriformer.properties.bench.pool import Built
from veriformer.properties.diagnosis.attentions import Attended, attentions
from veriformer.properties.diagnosis.caches.forks import forked_cause, places_cause
from veriformer.properties.diagnosis.caches.kept import steps_of
from veriformer.properties.diagnosis.caches.runs import CachedRuns
from veriformer.properties.engine.case import Case

_ORDER = [2, 0, 3, 1]
"""One cycle of four samples: applied twice, and turned round, it is another order each time."""
_INVERSE = [1, 3, 0, 2]
_TWICE = [_ORDER[n] for n in _ORDER]
_PAST, _NEW = 4, 2
_OVERWRITTEN = (
    ": rows are copied one after another in the same buffer, so that one is read after it was overwritten by another"
)


def beam_cause(case: Case, built: Built, mask: Tensor | None) -> str | None:
    """Explain what follows the beams and what does not.

    Args:
        case: of the failure.
        built: its model.
        mask: the padding mask that it failed with, if any.
    """
    runs = CachedRuns(case, built)
    x = runs.tokens(len(_ORDER), _PAST + _NEW)
    order = torch.tensor(_ORDER, device=x.device)
    mixed = torch.cat([x[order, :_PAST], x[:, _PAST:]], dim=1)
    got = runs.cached(x, [_PAST, _NEW], reorder=order)[:, _PAST:]
    if not runs.wrong(got, runs.whole(mixed)[:, _PAST:]):
        return (None if mask is None else _mask_cause(runs, x, order)) or forked_cause(runs)
    shown = _whose(runs, x, order)
    if all(not past for past in shown):
        return "after a reordering no output depends on any sample's past: the cache is lost there"
    kept = _kept(runs, x, order)
    if kept:
        return kept
    if shown == [{n} for n in range(len(_ORDER))]:
        return "each sample goes on with its own past: the cache is not reordered"
    if shown == [{n} for n in _INVERSE]:
        return "each sample goes on as the inverse of the order has it: cache[order] and its inverse are mixed up"
    if shown == [{n} for n in _TWICE]:
        return (
            "each sample goes on as the order has it when it is applied twice: what layers share is reordered by each"
        )
    if shown == [{n, _ORDER[n]} for n in range(len(_ORDER))]:
        told = "each sample depends on two pasts after a reordering, its own and the one that it was taken from: "
        if _all_follow(runs, x, order):
            return (
                f"{told}keys and values are reordered, and another state that is kept beside them (a last token, what "
                "a convolution or a mask keeps) is not"
            )
        return f"{told}a part of the cache (keys, values or some layers) is not reordered"
    told = f"after the order {_ORDER} the samples depend on the pasts of {[sorted(past) for past in shown]}"
    return f"{told}{_OVERWRITTEN}" if shown == [{n} for n in _one_by_one(_ORDER)] else told


def _whose(runs: CachedRuns, x: Tensor, order: Tensor) -> list[set[int]]:
    """Return for each sample on whose past its new outputs depend."""
    before = runs.cached(x, [_PAST, _NEW], reorder=order)[:, _PAST:]
    found: list[set[int]] = [set() for _ in _ORDER]
    for m in range(len(_ORDER)):
        changed = x.clone()
        changed[m, :_PAST] = (x[m, :_PAST] + 1) % runs.built.config.vocab_size
        after = runs.cached(changed, [_PAST, _NEW], reorder=order)[:, _PAST:]
        moved = (after - before).abs().amax(dim=(1, 2)) > runs.limit(before)
        for n in moved.nonzero().flatten().tolist():
            found[n].add(m)
    return found


def _kept(runs: CachedRuns, x: Tensor, order: Tensor) -> str | None:
    """Look at the keys and values that the second chunk attends to."""
    whole = attentions(lambda: runs.whole(x))
    steps = steps_of(attentions(lambda: runs.cached(x, [_PAST, _NEW], reorder=order)), len(whole))
    if steps is None or [step.size for step in steps] != [_PAST, _NEW]:
        return None
    wrong: dict[str, list[int]] = {"keys": [], "values": []}
    depth = len(whole)
    for layer in range(depth):
        first, second = steps[0].layers[layer], steps[1].layers[layer]
        for name in wrong:
            taken = _taken_from(first, second, "key" if name == "keys" else "value")
            if taken is None:
                return None
            if taken != _ORDER:
                wrong[name].append(layer)
                if taken == list(range(len(_ORDER))):
                    continue
                if taken == _INVERSE:
                    return f"after a reordering the cached {name} are those of the inverse order"
                if -1 in taken and _heads_moved(first, second, "key" if name == "keys" else "value"):
                    return f"a reordering permutes the heads of the cached {name}, not the samples: the wrong axis"
                if taken == _TWICE:
                    return f"a reordering is applied twice to the cached {name}, by each layer that shares them, say"
                told = f"after the order {_ORDER} the cached {name} are those of the samples {taken}"
                return f"{told}{_OVERWRITTEN}" if taken == _one_by_one(_ORDER) else told
    if wrong["keys"] and wrong["values"]:
        if len(wrong["keys"]) == depth and len(wrong["values"]) == depth:
            return "the past was not reordered: each sample keeps its own keys and values"
        if wrong["keys"] == wrong["values"]:
            return f"the caches of the layers {_counted(wrong['keys'])} of {depth} are not reordered, the others are"
        return None
    for name, other in (("keys", "values"), ("values", "keys")):
        if wrong[name]:
            some = "" if len(wrong[name]) == depth else f" of the layers {_counted(wrong[name])}"
            return f"the cached {other} are reordered with the beams and the cached {name}{some} are not"
    return None


def _all_follow(runs: CachedRuns, x: Tensor, order: Tensor) -> bool:
    """Whether the keys and values of every attention are seen, and are those of the samples in the new order."""
    whole = attentions(lambda: runs.whole(x))
    steps = steps_of(attentions(lambda: runs.cached(x, [_PAST, _NEW], reorder=order)), len(whole))
    if not whole or steps is None or [step.size for step in steps] != [_PAST, _NEW]:
        return False
    pairs = zip(steps[0].layers[:1], steps[1].layers[:1], strict=True)  # behind the first all may be other numbers
    return all(_taken_from(first, second, name) == _ORDER for first, second in pairs for name in ("key", "value"))


def _one_by_one(order: list[int]) -> list[int]:
    """Return whose rows stand where after rows were copied one after another, in place."""
    rows = list(range(len(order)))
    for to, source in enumerate(order):
        rows[to] = rows[source]
    return rows


def _counted(layers: list[int]) -> str:
    return ", ".join(str(layer + 1) for layer in layers)


def _samples(value: Tensor) -> Tensor | None:
    """Return `[B, *, S, K]` of rows with the samples first."""
    if value.shape[0] % len(_ORDER):
        return None
    return value.unflatten(0, (len(_ORDER), -1)).flatten(1, -3).double()


def _taken_from(first: Attended, second: Attended, part: str) -> list[int] | None:
    """Return for each sample whose rows of the first chunk it attends to in the second; -1: nobody's."""
    one, two = getattr(first, part), getattr(second, part)
    if two.shape[-2] < _PAST + _NEW:
        return None
    kept, now = _samples(one), _samples(two[..., :_PAST, :])
    if kept is None or now is None or kept.shape != now.shape:
        return None
    return [next((m for m in range(len(_ORDER)) if _same(now[n], kept[m])), -1) for n in range(len(_ORDER))]


def _heads_moved(first: Attended, second: Attended, part: str) -> bool:
    kept, now = _samples(getattr(first, part)), _samples(getattr(second, part)[..., :_PAST, :])
    if kept is None or now is None:
        return False
    return all(any(_same(head, own) for own in kept[n]) for n in range(len(_ORDER)) for head in now[n])


def _same(one: Tensor, two: Tensor) -> bool:
    return bool(((one - two).abs() <= 1e-4 * two.abs().amax()).all())


def _mask_cause(runs: CachedRuns, x: Tensor, order: Tensor) -> str | None:
    """Tell which past mask is used after a reordering that is right without one: which tokens are not seen."""
    mask = torch.ones_like(x, dtype=torch.bool)
    mask[0, : _PAST - 1] = False
    mask[1, :1] = False
    before = runs.cached(x, [_PAST, _NEW], mask, reorder=order)[:, _PAST:]
    seen = torch.zeros(len(_ORDER), _PAST, dtype=torch.bool)  # of the past of the sample that each was taken from
    for place in range(_PAST):
        changed = x.clone()
        changed[:, place] = (x[:, place] + 1) % runs.built.config.vocab_size
        after = runs.cached(changed, [_PAST, _NEW], mask, reorder=order)[:, _PAST:]
        seen[:, place] = ((after - before).abs().amax(dim=(1, 2)) > runs.limit(before)).cpu()
    past, taken = mask[:, :_PAST].cpu(), torch.tensor(_ORDER)
    inside = past[taken]
    padding = ~inside  # in the sample that a past was taken from; elsewhere later tokens hold what is hidden now
    if not bool(seen[padding].any()):
        return places_cause(runs, x, order, mask, _PAST)
    told = {
        "keys and values are reordered with the beams, the padding mask of the past is not": past,
        "the padding mask of the past follows the inverse of the order": past[torch.tensor(_INVERSE)],
        "after a reordering the padding mask of the past is forgotten": torch.ones_like(past),
    }
    return next((text for text, used in told.items() if bool((seen[padding] == used[padding]).all())), None)

"""What the attentions of a cached run are given, held against those of the whole run: keys, values, positions, mask."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from veriformer.properties.definitions.differences import size_of
from veriformer.properties.diagnosis.attentions import Attended, module_calls, near, rows_of
from veriformer.properties.diagnosis.caches.heads import head_cause
from veriformer.properties.diagnosis.caches.parted import parted_cause
from veriformer.properties.diagnosis.caches.runs import BATCH, CachedRuns

_COARSE = 0.05
"""Keys that are off by less, of the largest, are the same ones, rounded."""
_LEAST = 1e-6  # a weight below is that of a hidden key


@dataclass
class Step:
    """The attentions of one chunk.

    Attributes:
        start: tokens that were fed before.
        size: tokens of the chunk.
        layers: its attentions.
    """

    start: int
    size: int
    layers: list[Attended]


def steps_of(seen: list[Attended], num_layers: int) -> list[Step] | None:
    """Part the attentions of a cached run into chunks; None where their number does not fit."""
    if not num_layers or not seen or len(seen) % num_layers:
        return None
    found, start = [], 0
    for i in range(0, len(seen), num_layers):
        layers = seen[i : i + num_layers]
        size = layers[0].weights.shape[-2]
        found.append(Step(start, size, layers))
        start += size
    return found


def kept_cause(runs: CachedRuns, sizes: Sequence[int]) -> str | None:
    """Name the first thing that differs between a cached run and the whole one."""
    x = runs.tokens(BATCH, sum(sizes))
    whole = runs.attended(lambda: runs.whole(x))
    steps = steps_of(runs.attended(lambda: runs.cached(x, sizes)), len(whole))
    if steps is None or sum(step.size for step in steps) != sum(sizes):
        return None
    short = runs.attended(lambda: runs.whole(x[:, : sum(sizes) // 2 + 1]))
    if short and short[0].key.shape[:-2] == whole[0].key.shape[:-2]:
        rows = rows_of(short[0].key, whole[0].key)
        if rows != list(range(len(rows))):
            return (
                "the keys of the whole run depend on how long the sequence is (dynamic rotary positions, say), those "
                "in the cache stay as they were when they were stored"
            )
    for number, step in enumerate(steps):
        for layer, (got, expected) in enumerate(zip(step.layers, whole, strict=True)):
            told = _differs(runs, steps, number, layer, got, expected)
            if told:
                where = f"; first seen in attention {layer + 1} of {len(whole)}" if layer else ""
                return told + where
            if not _given_alike(step, got, expected):
                return _left_out(runs, sizes)  # wrong here, and unexplained: nothing behind it tells more
    return _left_out(runs, sizes)


def rounded_cause(runs: CachedRuns) -> str | None:
    """Say in which dtype, or with which step, keys and values are kept, where it is not that of the model."""
    x = runs.tokens(BATCH, 4)
    whole = runs.attended(lambda: runs.whole(x))
    steps = steps_of(runs.attended(lambda: runs.cached(x, [1] * 4)), len(whole))
    if not whole or steps is None or len(steps) != 4:
        return None
    expected, got = whole[0], _first_keys(steps[-1].layers[0], whole[0])
    if got.key.shape != expected.key.shape:
        return None
    if _agree(got.key, expected.key):
        return _one_step(runs, x, expected)
    for dtype in (torch.bfloat16, torch.float16):
        parts = ((got.key, expected.key), (got.value, expected.value))
        if all(_agree(one[..., :3, :], two[..., :3, :].to(dtype).to(two.dtype)) for one, two in parts):
            name = str(dtype).removeprefix("torch.")
            return f"keys and values are kept in {name}, whatever the model computes in: the past is rounded to it"
    return None


def _first_keys(got: Attended, expected: Attended) -> Attended:
    """Leave out the empty places of a cache of a fixed length."""
    many = expected.key.shape[-2]
    if got.key.shape[-2] <= many:
        return got
    return replace(got, key=got.key[..., :many, :], value=got.value[..., :many, :])


def _one_step(runs: CachedRuns, x: Tensor, expected: Attended) -> str | None:
    """Say that a chunk is rounded with one step, where its tokens by themselves are kept as they should be."""
    chunk = runs.attended(lambda: runs.cached(x, [x.shape[1]]))
    if not chunk or (got := _first_keys(chunk[0], expected)).key.shape != expected.key.shape:
        return None
    off = float((got.key - expected.key).abs().max()) / size_of(expected.key)
    if not near(got.key) < off < _COARSE:
        return None
    return (
        f"keys and values of a chunk of several tokens are those of the whole run rounded otherwise, by up to "
        f"{off:.2g} of the largest, and those of a single token are right: one step (scale) is taken for a whole "
        "chunk, where each token has its own"
    )


def _given_alike(step: Step, got: Attended, expected: Attended) -> bool:
    """Return whether an attention is given the queries and keys of the whole run, where that can be said."""
    if got.query.shape[:-2] != expected.query.shape[:-2]:
        return True
    end = step.start + step.size
    many = got.key.shape[-2]
    if many > end:
        return True
    return _agree(got.query, expected.query[..., step.start : end, :]) and all(
        _agree(one, two[..., end - many : end, :])
        for one, two in ((got.key, expected.key), (got.value, expected.value))
    )


def _differs(
    runs: CachedRuns, steps: list[Step], number: int, layer: int, got: Attended, expected: Attended
) -> str | None:
    sizes = [step.size for step in steps]
    step = steps[number]
    end, many = step.start + step.size, got.key.shape[-2]
    begins = f"chunk {number + 1}, behind {step.start} cached token{'s' * (step.start != 1)}"
    if got.query.shape[:-2] != expected.query.shape[:-2]:
        return None
    if got.key.shape[-1] != expected.key.shape[-1]:
        return _of_other_width(begins, got, expected, step)
    if told := head_cause(begins, got, expected, end):
        return told
    queries = rows_of(got.query, expected.query)
    keys = rows_of(got.key, expected.key)
    values = rows_of(got.value, expected.value)
    new, past = keys[-step.size :], keys[: many - step.size]
    wanted = list(range(step.start, end))
    if values[-step.size :] != wanted and new != wanted and queries != wanted:
        return (
            _positions(runs, "embeddings", layer)
            or _left_out(runs, sizes)
            or parted_cause(runs, sizes)
            or _other_input(begins, layer)
        )
    if queries != wanted or new != wanted:
        turned = "queries and keys" if queries != wanted and new != wanted else "queries" if new == wanted else "keys"
        return _positions(runs, turned, layer)
    known = list(range(step.start - len(past), step.start))
    if values[: len(past)] != known and past == known:
        if got.value.shape == got.key.shape and _agree(
            got.value[..., : len(past), :], expected.key[..., : len(past), :]
        ):
            return f"in {begins}, the past values are the keys of those tokens: keys are stored for values"
        return f"in {begins}, the past keys are right and the past values are not those of these tokens"
    if past != known:
        return _past_keys(runs, begins, steps, number, layer, past, known, values)
    return _weights(begins, got, expected, step, int(runs.case.subject.fact("window", 0)))


def _of_other_width(begins: str, got: Attended, expected: Attended, step: Step) -> str | None:
    """Compare the weights alone, where queries and keys have another width with the cache (maps that are absorbed)."""
    end, many = step.start + step.size, got.weights.shape[-1]
    if got.weights.shape[:-2] != expected.weights.shape[:-2] or many > end:
        return None
    right = expected.weights[..., step.start : end, end - many : end]
    if _agree(got.weights, right):
        return None
    seen = (right > _LEAST) & (got.weights > _LEAST)
    if not torch.equal(seen, right > _LEAST):
        return None
    logs = [torch.where(seen, w.double().clamp(min=1e-30).log(), 0.0) for w in (got.weights, right)]
    count = seen.sum(-1, keepdim=True).clamp(min=1)
    one, two = (torch.where(seen, x - x.sum(-1, keepdim=True) / count, 0.0) for x in logs)
    factor = float((one * two).sum() / two.square().sum().clamp(min=1e-30))
    widths = f"{got.key.shape[-1]} channels with the cache and {expected.key.shape[-1]} without"
    told = f"in {begins}, queries and keys have {widths}, and "
    if float((one - factor * two).abs().max()) < 1e-3 * max(1.0, float(two.abs().max())):
        return f"{told}the scores are {factor:.4g} times those of the whole run: another scale"
    return f"{told}the weights are not those of the whole run"


def _past_keys(
    runs: CachedRuns,
    begins: str,
    steps: list[Step],
    number: int,
    layer: int,
    past: list[int],
    known: list[int],
    values: list[int],
) -> str | None:
    strange = [i for i, place in enumerate(past) if place < 0]
    if not strange:
        if values[: len(past)] == past:
            return f"in {begins}, the cache holds the tokens {past}, not {known}"
        return f"in {begins}, the cached keys are those of the tokens {past}, not {known}"
    values_right = values[: len(past)] == known
    if not values_right:
        return f"in {begins}, neither the past keys nor the past values are those of these tokens"
    places = _places(runs, [s.size for s in steps], layer, lambda a: a.key)
    if places is not None:
        read = places[number][: len(past)]
        if -1 not in read and read != known:
            twice = any(read == [k * p for p in known] for k in range(2, 9)) or read[-1] > known[-1]
            return (
                f"in {begins}, the cached keys, which were right when they were stored, stand at positions {read} "
                f"instead of {known}: kept keys are rotated "
                + ("once more at each step" if twice else "anew, to other positions, at each step")
            )
    return (
        f"in {begins}, cached keys are not what they were when they were stored (their values are): "
        "keys that are kept are changed again, as by a second rotation"
    )


def _weights(begins: str, got: Attended, expected: Attended, step: Step, window: int) -> str | None:
    """Compare what is given to each key: a mask or a bias, where queries and keys agree."""
    many = got.weights.shape[-1]
    end = step.start + step.size
    if got.weights.shape[:-2] != expected.weights.shape[:-2]:
        return None
    right = expected.weights[..., step.start : end, end - many : end]
    if _agree(got.weights, right) and float(right.sum(-1).min()) > 1 - _LEAST:
        return None
    more = (got.weights > _LEAST) & (right <= _LEAST)
    less = (got.weights <= _LEAST) & (right > _LEAST)
    if bool(more.any()) or bool(less.any()):
        at = sorted({end - many + s for *_, s in (more | less).nonzero().tolist()})
        kind = "are seen that must not be" if bool(more.any()) else "are hidden"
        if window and not bool(less.any()):
            ages = torch.arange(step.start, end)[:, None] - torch.arange(end - many, end)[None]
            if bool((ages.to(more.device).expand_as(more)[more] >= window).all()):
                which = "a chunk of several tokens" if step.size > 1 else "a single token"
                return (
                    f"in {begins}, queries, keys and values are right, and keys {at} are seen by queries that they lie "
                    f"{window} or more places before: the window of {window} is not applied to {which} behind a cache"
                )
        return f"in {begins}, queries, keys and values are right, and keys {at} {kind}: the mask is wrong there"
    if float(right.sum(-1).min()) < 1 - _LEAST:
        return f"in {begins}, the cache holds {many} keys, and the whole run gives weight to more"
    return (
        f"in {begins}, queries, keys, values and mask are right, and the weights are not: "
        "a bias by distance, or the scale, is another one there"
    )


def _positions(runs: CachedRuns, what: str, layer: int) -> str | None:
    """Read the positions that new tokens are given off a sequence of one token repeated: they alone tell it apart."""
    read: list[tuple[int, int, list[int]]] = []
    sizes = [3, 1, 2, 1, 1]
    pick: Callable[[Attended], Tensor] = (lambda a: a.key) if what == "keys" else (lambda a: a.query)
    places = _places(runs, sizes, layer, pick)
    if places is None:
        return None
    for number, size in enumerate(sizes):
        read.append((sum(sizes[:number]), size, places[number][-size:]))
    if any(-1 in own for _, _, own in read) or all(own == list(range(n, n + s)) for n, s, own in read):
        return None
    wrong = [(n, s, own) for n, s, own in read[1:] if own != list(range(n, n + s))][:2] or read[1:3]
    told = "; ".join(f"{_run(own)} instead of {_run(list(range(n, n + s)))}" for n, s, own in wrong)
    behind = " and ".join(str(n) for n, _, _ in wrong)
    chunk = "chunks stand" if len(wrong) > 1 else "chunk stands"
    told = f"behind {behind} cached tokens the next {chunk} at positions {told}"
    if what in ("queries", "keys"):
        told = f"the {what} alone are wrong: {told}"
    return f"{told}: {_rule(runs, read)}"


def _stands_still(past: list[int], later: list[int]) -> str | None:
    """Say at how many tokens the count of those that are cached ends, as that of a window's does."""
    most = max(later)
    if most < max(past) and later == [min(n, most) for n in past]:
        return f"positions are counted by what the cache keeps, which is {most} tokens at most"
    return None


def _kept_alone(runs: CachedRuns, most: int) -> str | None:
    """Say that positions count what the cache keeps, where they rise to a number with single tokens and stay there."""
    steps = [1] * (most + 3)
    places = _places(runs, steps, 0, lambda a: a.query)
    if places is None or most < 1:
        return None
    return _stands_still(list(range(1, len(steps))), [own[0] for own in places[1:]])


def _rule(runs: CachedRuns, read: list[tuple[int, int, list[int]]]) -> str:
    starts = [own[0] for _, _, own in read]
    if any(len(own) > 1 and len(set(own)) == 1 for _, _, own in read):
        return "all tokens of a chunk get one position"
    if all(start == 0 for start in starts):
        return "positions start again at 0 with each chunk instead of at the number of cached tokens"
    past, later = [n for n, _, _ in read[1:]], starts[1:]
    if len(set(later)) == 1:
        if told := _kept_alone(runs, later[0]):
            return told
        named = _as_many(runs, later[0])
        return f"positions of every later chunk start at {later[0]}{named}, instead of at the number of cached tokens"
    if later == list(range(1, len(later) + 1)):
        return "chunks are counted, not tokens"
    if later == [s for _, s, _ in read[:-1]]:
        return "positions start at the length of the chunk before, not at that of all before"
    if later == [n + s for n, s, _ in read[1:]]:
        return "the count of cached tokens is advanced by the chunk before its positions are made"
    if later == [read[1][0] + n for n in range(len(later))] and len(later) > 1:
        return "behind the first chunk calls are counted, not tokens: each chunk moves positions on by one"
    if (ends := _stands_still(past, later)) is not None:
        return ends
    steps = {start - n for n, start in zip(past, later, strict=True)}
    if len(steps) == 1:
        off = steps.pop()
        return f"positions of later chunks are {abs(off)} too {'far' if off > 0 else 'small'}"
    firsts = {size: own[0] for _, size, own in reversed(read)}
    if all(own[0] == firsts[size] for _, size, own in read):
        return "chunks stand where the first one of their length stood: what is made for a length is kept for others"
    return "positions of later chunks are not the number of cached tokens"


def _as_many(runs: CachedRuns, start: int) -> str:
    """Say which size of the model every later chunk starts at, asked at all sizes."""
    known = {"num_heads", "num_key_value_heads", "num_layers", "d_head", "d_model"}
    same = {name for name in known if getattr(runs.built.config, name) == start}
    for config in runs.case.bench.configs:
        if len(same) <= 1:
            break
        other = CachedRuns(runs.case, runs.case.bench.pool.get(config, runs.built.dtype))
        places = _places(other, [3, 1], 0, lambda a: a.query)
        if places is not None and places[1][-1] >= 0:
            same = {name for name in same if getattr(config, name) == places[1][-1]}
    if start == BATCH:
        return ", as many as there are samples in the batch"
    if runs.source is not None and start == runs.source.shape[1]:
        return ", the length of the source"
    return f", which is {' or '.join(sorted(same))}" if same else ""


def _run(places: list[int]) -> str:
    return str(places[0]) if len(places) == 1 else f"{places}"


def _places(
    runs: CachedRuns, sizes: Sequence[int], layer: int, pick: Callable[[Attended], Tensor]
) -> list[list[int]] | None:
    """Return, for each chunk, at which positions its rows stand, on one token repeated; -1: at none of the table."""
    longest = int(min(runs.case.subject.fact("max_len", 64), runs.built.config.max_len, 24))
    token = torch.full((BATCH, longest), 1, device=runs.case.bench.device)
    table = runs.attended(lambda: runs.whole(token))
    steps = steps_of(runs.attended(lambda: runs.cached(token[:, : sum(sizes)], sizes)), len(table))
    if steps is None or len(steps) != len(sizes) or layer >= len(table):
        return None
    known = pick(table[layer])
    if rows_of(known, known) != list(range(longest)):
        return None  # positions do not show in this layer
    found = []
    for step in steps:
        rows = pick(step.layers[layer])
        if rows.shape[:-2] != known.shape[:-2]:
            return None
        found.append(rows_of(rows, known))
    return found


def _other_input(begins: str, layer: int) -> str:
    what = "attention 1 is given another input" if not layer else f"attention {layer} is right, {layer + 1} is not"
    where = "embeddings or positions are" if not layer else "what lies between the two is"
    return f"in {begins}, {what} (queries, keys and values of the new tokens): {where} other ones with the cache"


def _agree(got: Tensor, expected: Tensor) -> bool:
    return got.shape == expected.shape and bool(((got - expected).abs() <= near(got) * size_of(expected)).all())


def _left_out(runs: CachedRuns, sizes: Sequence[int]) -> str | None:
    """Name a module that the whole run calls and later chunks do not."""
    x = runs.tokens(2, sum(sizes))
    whole, model = runs.clean(), runs.clean()
    if not isinstance(model.module, nn.Module) or runs.source is not None:  # an encoder is called once
        return None
    usual = module_calls(whole.module, lambda: runs.call(whole, x))
    given = module_calls(model.module, lambda: runs.cached(x, sizes, on=model))
    less = [name for name, count in usual.items() if given.get(name, 0) < count * len(sizes) and name]
    if not less or any(given.get(n, 0) not in (0, usual[n]) for n in less):
        return None
    name = less[0]
    part = f"{name} ({type(dict(model.module.named_modules())[name]).__name__})"
    when = "is not called on the cached path" if not given.get(name) else "is called in the first chunk alone"
    return f"{part}, which the whole run calls, {when}; all that is attended before is right"

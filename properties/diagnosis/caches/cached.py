"""Why decoding through a cache parts from the whole sequence: what each output sees, what is kept, where it stands.

Three measurements, each on a new copy of the model. Which tokens the outputs of a cached run depend on, by replacing
them one at a time, against those of the whole run. What the attentions of a cached run are given, against those of the
whole run. And what a run leaves behind for the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from veriformer.properties.bench.guards import SubjectError
from veriformer.properties.bench.pool import Built
from veriformer.properties.diagnosis.caches.biased import biased_cause
from veriformer.properties.diagnosis.caches.convolved_past import convolved_past_cause
from veriformer.properties.diagnosis.caches.kept import kept_cause, rounded_cause
from veriformer.properties.diagnosis.caches.parted import parted_cause, remembered_cause, sources_cause
from veriformer.properties.diagnosis.caches.runs import CachedRuns
from veriformer.properties.engine.case import Case


def cache_cause(case: Case, built: Built, x: Tensor, sizes: Sequence[int]) -> str | None:
    """Explain why a cached run gives another output than the whole sequence.

    Args:
        case: of the failure.
        built: its model.
        x: `[B, T]`, the sequence that failed.
        sizes: of its chunks.
    """
    runs = CachedRuns(case, built)
    if not runs.wrong(runs.cached(x, sizes), runs.whole(x)):
        return _left_behind(runs, x, sizes)
    if told := _of_other_samples(runs):
        return told
    if told := convolved_past_cause(runs, [3, 1, 2, 1, 1]) or sources_cause(runs) or remembered_cause(runs):
        return told
    if told := rounded_cause(runs) or biased_cause(runs) or _unseen(runs):
        return told
    for form in (sizes, [3, 1, 2, 1, 1], [1] * 6):
        told = kept_cause(runs, form)
        if told:
            return told
    return _error_by_chunks(runs, parted_cause(runs, [3, 1, 2, 1, 1])) or parted_cause(runs, sizes)


def _of_other_samples(runs: CachedRuns) -> str | None:
    """Say that cached runs of samples alone are right, and wrong beside others, and beside which."""
    one = runs.tokens(1, min(6, runs.length))
    sizes = [1] * one.shape[1]
    other = (one + 1) % runs.built.config.vocab_size
    shared, same = other.clone(), other.clone()
    shared[:, 2] = one[:, 2]
    same[:, :3] = one[:, :3]

    def is_wrong(*samples: Tensor) -> bool:
        x = torch.cat(samples)
        return bool(runs.wrong(runs.cached(x, sizes), runs.whole(x)))

    if is_wrong(one) or is_wrong(shared) or not (is_wrong(one, shared) or is_wrong(one, other)):
        return None
    told = "a cached run is right for each sample alone, and wrong for several: "
    if is_wrong(one, other):
        return f"{told}what is kept of one sample is used for another"
    if is_wrong(one, same):
        return f"{told}where two samples have a token in common at one position one gets what is kept of the other"
    return (
        f"{told}where two samples have a token in common at one position, and other tokens before it, one gets what is "
        "kept of the other: that is found by the token and its position, not by all that stands before it (the "
        "whole prefix)"
    )


def _error_by_chunks(runs: CachedRuns, parted: str | None) -> str | None:
    """Say what is known where every output sees what it should and the attentions do not show."""
    length = runs.length
    x = runs.tokens(2, length)
    expected = runs.whole(x)
    wrong = runs.wrong(runs.cached(x, [1] * length), expected)
    if not wrong:
        return None
    several = [2] * (length // 2 - 1) + [length - 2 * (length // 2 - 1)]
    told = f"each cached output depends on just the tokens that it should, and is wrong from position {wrong[0]} on"
    shared = _shared_heads_alone(runs)
    if runs.wrong(runs.cached(x, several), expected):
        if shared or not parted:
            return f"{told}: {shared or 'positions of later chunks, or the kept keys and values themselves, are wrong'}"
        return parted
    told = f"chunks of several tokens are right, single-token steps are wrong from position {wrong[0]} on: what is "
    return f"{told}computed there for one new token {shared or 'is not what is computed for several'}"


def _shared_heads_alone(runs: CachedRuns) -> str | None:
    """Say that a cached run is wrong where heads share keys and right where each has its own."""
    config = runs.built.config
    heads, groups = config.num_heads, config.num_key_value_heads
    if groups == heads:
        return None
    try:
        own = runs.case.bench.pool.get(replace(config, num_key_value_heads=heads), runs.built.dtype)
        other = CachedRuns(runs.case, own)
        x = other.tokens(2, other.length)
        if other.wrong(other.cached(x, [1] * other.length), other.whole(x)):
            return None
    except (SubjectError, RuntimeError):
        return None
    return (
        f"is right where each head has keys of its own, and wrong where {heads} heads share those of {groups}: query "
        "heads read the keys of other groups than without the cache"
    )


def _left_behind(runs: CachedRuns, x: Tensor, sizes: Sequence[int]) -> str | None:
    """Tell what a cached run leaves for the next, where the first one on a new model is right."""
    model, expected = runs.clean(), runs.whole(x)
    before = runs.tokens(*x.shape)
    runs.cached(before, sizes, on=model)
    after = runs.cached(x, sizes, on=model)
    if not runs.wrong(after, expected):
        asked = runs.clean()
        with torch.no_grad():
            runs.call(asked, x)
        is_changed = bool(runs.wrong(runs.cached(x, sizes, on=asked), expected))
        return "a cached run is right on a new model and wrong after a call without a cache" if is_changed else None
    other = runs.clean()
    runs.cached((before + 1) % runs.built.config.vocab_size, sizes, on=other)
    moved = runs.wrong(runs.cached(x, sizes, on=other), after)
    told = "a cached run is right on a new model and wrong after another run: "
    if not moved:
        return f"{told}what is left of that is not its tokens but their number: positions, or a mask, go on from there"
    told += "the cache is not cleared between runs, and the tokens of the former one are still attended to"
    third = runs.clean()
    try:
        runs.cached(runs.tokens(len(x) + 1, x.shape[1]), sizes, on=third)
        is_right = not runs.wrong(runs.cached(x, sizes, on=third), expected)
    except (SubjectError, RuntimeError):
        return told
    return f"{told}; after a run of another batch size it is right: only that clears it" if is_right else told


def _unseen(runs: CachedRuns) -> str | None:
    """Name what outputs of a cached run see and must not, or do not see and must; None where all is seen."""
    length = runs.length
    x = runs.tokens(2, length)
    expected, allowed = runs.whole(x), runs.seen(None, x)
    first = 3
    single, chunked = [1] * length, [first, length - first]
    steps = runs.wrong(runs.cached(x, single), expected)
    whole = runs.wrong(runs.cached(x, [length]), expected)
    by_step = runs.seen(single, x)
    if whole and not bool((allowed & ~by_step).any()) and (told := _one_chunk(runs, x, allowed, steps_right=not steps)):
        return told
    by_chunk = _without_blind_rows(runs.seen(chunked, x), allowed)
    ahead = by_chunk & ~allowed & torch.ones_like(allowed).triu(1)
    if bool(ahead.any()):
        reach = sorted({s - t for t, s in ahead.nonzero().tolist()})
        right = "" if whole else "a first chunk is right"
        right += "" if steps else f"{' and' if right else ''} single-token steps are right"
        far = "the later tokens of that chunk" if max(reach) > 1 else "the token one step ahead"
        return (
            f"in a chunk of several tokens behind a filled cache, tokens see {far}: the causal mask is "
            f"{'missing' if max(reach) > 1 else 'off by one'} inside such a chunk" + (f" ({right})" if right else "")
        )
    if told := _sinks_lost(by_step, allowed):
        return told
    if bool((by_step & ~allowed).any()):
        back = max(t - s for t, s in (by_step & ~allowed).nonzero().tolist())
        least = max(t - s for t, s in allowed.nonzero().tolist())
        depth = max(1, runs.built.config.num_layers)
        if runs.window and back < runs.length - 1 and back - least < 2 * depth and (back - least) % depth == 0:
            more = (back - least) // depth
            return (
                f"in each of {depth} layers a cached step sees {least // depth + more} past tokens where the whole "
                f"run, with a window of {runs.window}, sees {least // depth}: with the new token that is {more} more "
                "than the window: that many keys too many are kept, or not hidden, on the cached path"
            )
        return (
            f"the cached run sees {back} steps back where the whole run sees {least}: "
            "the window is not applied to cached keys"
        )
    if bool((allowed & ~by_step).any()):
        return _lost(runs, x, by_step, allowed)
    if bool((allowed & ~by_chunk).any()) and not steps:
        short = [first, *[2] * ((length - first) // 2), *[1] * ((length - first) % 2)]
        return _lost_in_chunk(by_chunk, allowed, first, _without_blind_rows(runs.seen(short, x), allowed))
    return None


def _sinks_lost(seen: Tensor, allowed: Tensor) -> str | None:
    """Say that the first tokens, which are seen to the end though those behind them are not, are given up."""
    missing = allowed & ~seen
    lost = _columns(missing)
    if not lost or lost != list(range(len(lost))) or len(lost) == len(allowed):
        return None
    if bool(allowed[-1, len(lost)]) or bool(seen[-1, lost].any()):
        return None
    more = bool((seen & ~allowed).any())
    return (
        f"from step {int(missing.any(1).nonzero().min())} on cached steps do not see {_tokens(lost)}, which the whole "
        f"run sees to the end{', and see later ones that it does not' if more else ''}: of what is kept the first ones "
        f"(sinks) are given up{', and ones older than the window stay in their place' if more else ''}"
    )


def _columns(pairs: Tensor) -> list[int]:
    return [s for s in range(pairs.shape[1]) if bool(pairs[:, s].any())]


def _tokens(places: list[int]) -> str:
    return f"token{'s' * (len(places) > 1)} {', '.join(map(str, places))}"


def _without_blind_rows(seen: Tensor, allowed: Tensor) -> Tensor:
    """Leave out what lies ahead of tokens that see nothing of their past: without a key all weights are the same."""
    past = torch.ones_like(allowed).tril(-1)
    blind = (allowed & past).any(1) & ~(seen & allowed & past).any(1)
    blind[:1] |= blind[1:2]  # a first token has no past that would tell
    return seen & ~(blind[:, None] & past.mT)


def _one_chunk(runs: CachedRuns, x: Tensor, allowed: Tensor, *, steps_right: bool) -> str | None:
    """Tell what is wrong where a single chunk, with an empty cache, already differs."""
    seen = _without_blind_rows(runs.seen([x.shape[1]], x), allowed)
    told = "single-token steps are right, and " if steps_right else ""
    told += "the whole sequence as one chunk already differs: "
    missing = allowed & ~seen
    if bool((seen & ~allowed).any()):
        if not bool(missing.any()):
            return f"{told}on the cached path tokens see later ones, its causal mask is missing"
        lost, early = _columns(missing), _columns(seen & ~allowed)
        if max(lost) >= min(early):
            return None
        return (
            f"{told}no token sees {_tokens(lost)} of the past, all see {_tokens(early)} in their place: keys of one "
            "chunk are written over one another, where a chunk goes on behind the end of a page, say"
        )
    if not bool(missing.any()):
        return None
    # what the last one does not see is lost on the way through earlier tokens alone: as a step of its own it is right
    if steps_right and not bool(seen[-1, _columns(missing)].any()):
        return (
            f"{told}its earlier tokens lose keys that they should see, the last one loses none: the cache is cut to "
            "what the last token sees before the chunk attends, not after"
        )
    return f"{told}{int(missing.sum())} of {int(allowed.sum())} pairs that should see one another do not"


def _lost(runs: CachedRuns, x: Tensor, seen: Tensor, allowed: Tensor) -> str | None:
    """Name what single-token steps do not see."""
    length = len(allowed)
    missing = allowed & ~seen
    below = torch.ones_like(allowed).tril(-1) & allowed
    if bool((missing == below).all()):
        alone = torch.cat([runs.whole(x[:, t : t + 1]) for t in range(length)], dim=1)
        fresh = not runs.wrong(runs.cached(x, [1] * length), alone)
        more = (
            ", and each chunk gives just what it gives as a sequence of its own, so positions start at 0 too"
            if fresh
            else ""
        )
        return f"no output depends on any token of an earlier chunk: the cached keys and values are not used{more}"
    if length > 3 and all(bool((seen[t] == _only(length, 0, t)).all()) for t in range(1, length)):
        return (
            "a cached step sees the first token and itself alone: the causal mask of a step is aligned to the top left "
            "(row 0), not to the last key"
        )
    columns = [s for s in range(length) if bool(missing[:, s].any())]
    whole_columns = [s for s in columns if bool((missing[:, s] == below[:, s]).all())]
    if columns == whole_columns:
        named = "the first token" if columns == [0] else f"tokens {', '.join(map(str, columns))}"
        return f"no later chunk sees {named} of the past, all others are seen: it is dropped from the cache, or hidden"
    distances = sorted({t - s for t, s in missing.nonzero().tolist()})
    kept = [t - s for t, s in (seen & below).nonzero().tolist()]
    if kept and max(kept) < min(distances):
        wanted = max(t - s for t, s in allowed.nonzero().tolist())
        depth = max(1, runs.built.config.num_layers)
        if wanted % depth or max(kept) % depth or wanted == length - 1:
            depth = 1
        window = f", with a window of {runs.window}," if runs.window else ""
        return (
            f"a cached step sees {max(kept) // depth} past tokens{' a layer' if depth > 1 else ''} where the whole "
            f"run{window} sees {wanted // depth}: keys are dropped from the cache too early, or hidden there"
        )
    if min(distances) == 1 and all(bool(missing[t, t - 1]) for t in range(2, length)):
        near = [d for d in distances if all(bool(missing[t, t - d]) for t in range(d + 1, length))]
        if len(near) == len(distances) and max(near) < length - 2:
            return f"a cached step does not see the {len(near)} tokens right before it; older ones are seen"
    rows = [t for t in range(length) if bool(missing[t].any())]
    if len(distances) == 1:
        return (
            f"from step {rows[0]} on cached steps do not see the token {distances[0]} before them, all others that "
            "they should: that entry of the cache is lost, overwritten or hidden"
        )
    return (
        f"from step {rows[0]} on cached steps do not see {int(missing.sum())} of {int(allowed.sum())} tokens that "
        "they should: entries of the cache are lost or hidden"
    )


def _only(length: int, *places: int) -> Tensor:
    row = torch.zeros(length, dtype=torch.bool)
    row[list(places)] = True
    return row


def _lost_in_chunk(seen: Tensor, allowed: Tensor, first: int, by_two: Tensor) -> str | None:
    """Name what tokens of a later chunk of several do not see, where single-token steps see all.

    Args:
        seen: `[T, T]`, by chunks of `first` and of all others.
        allowed: `[T, T]`.
        first: the length of the first chunk.
        by_two: `[T, T]`, seen where the later chunks have two tokens.
    """
    length = len(allowed)
    missing = allowed & ~seen
    rows = [t for t in range(length) if bool(missing[t].any())]
    told = "single-token steps are right; in a chunk of several tokens behind a filled cache "
    if rows == list(range(first, length)) and bool((missing[first:, :first] == allowed[first:, :first]).all()):
        if bool((by_two & allowed)[first:, :first].any()):
            return (
                f"{told}that is long no token sees the past, in a short one they do: the cache is cut to its last "
                "keys, those of the chunk among them, before the chunk attends, not after"
            )
        return f"{told}no token sees the past: the cached keys are hidden, or left out, there"
    below = torch.ones_like(allowed).tril(-1)
    oldest = [int(row.nonzero().min()) if bool(row.any()) else length for row in seen & below]
    if rows[-1] < length - 1 and all(int(missing[t].nonzero().max()) < oldest[t] for t in rows):
        return (
            f"{told}the earlier tokens lose keys that they should see, the last one loses none: the cache is cut to "
            "what the last token sees before the chunk attends, not after"
        )
    ends = [int(missing[t].nonzero().max()) for t in rows]
    if all(end >= t - 1 for end, t in zip(ends, rows, strict=True)):
        return f"{told}tokens do not see the keys right before them: the causal mask is aligned to the first key"
    return f"{told}{len(rows)} do not see all that they should"

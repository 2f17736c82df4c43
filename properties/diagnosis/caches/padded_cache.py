"""Why decoding with left padding parts from the whole padded batch: padding is seen, or positions count it."""

from __future__ import annotations

import torch

from veriformer.properties.bench.pool import Built
from veriformer.properties.diagnosis.attentions import attentions, rows_of
from veriformer.properties.diagnosis.caches.kept import steps_of
from veriformer.properties.diagnosis.caches.runs import BATCH, CachedRuns
from veriformer.properties.engine.case import Case

_PADS, _SIZES = 2, (4, 1, 2)


def padded_cause(case: Case, built: Built) -> str | None:
    """Explain what left padding does to a cached run that is right without it."""
    runs = CachedRuns(case, built)
    length = sum(_SIZES)
    x = runs.tokens(2, length)
    mask = torch.ones_like(x, dtype=torch.bool)
    mask[0, :_PADS] = False
    got, expected = runs.cached(x, _SIZES, mask), runs.whole(x, mask)
    wrong = [t for t in runs.wrong(got[:1], expected[:1]) if t >= _PADS]
    if not wrong and not runs.wrong(got[1:], expected[1:]):
        return None
    changed = x.clone()
    changed[0, :_PADS] = (x[0, :_PADS] + 1) % built.config.vocab_size
    moved = [t for t in runs.wrong(runs.cached(changed, _SIZES, mask), got) if t >= _PADS]
    first = _SIZES[0]
    if moved and min(moved) >= first:
        return (
            "other content in the padding moves outputs from chunk 2 on and none in chunk 1, where it stands: padding "
            "of earlier chunks becomes visible, the mask of cached positions is not kept"
        )
    if moved:
        unmasked = runs.cached(x, _SIZES)
        if not [t for t in runs.wrong(got, unmasked) if t >= _PADS]:
            return "the cached run with the mask equals the one without: the padding mask is not used with the cache"
        return "other content in the padding moves outputs of the chunk that it stands in: it is not hidden there"
    if not wrong:
        return "the sample without padding is the one that differs: the padded sample's mask is used for others"
    return _positions(runs) or (
        f"padding is hidden from all chunks, and outputs are wrong from position {wrong[0]} on: positions count from "
        "another place with the cache than in the whole batch"
        if wrong[0] >= first or wrong[0] == _PADS
        else None
    )


def _positions(runs: CachedRuns) -> str | None:
    """Read off one token repeated where the tokens of each chunk stand behind left padding, cached and not."""
    longest = int(min(runs.case.subject.fact("max_len", 64), runs.built.config.max_len, 24))
    token = torch.full((BATCH, longest), 1, device=runs.case.bench.device)
    length = sum(_SIZES)
    mask = torch.ones(BATCH, length, dtype=torch.bool, device=token.device)
    mask[:, :_PADS] = False
    table = attentions(lambda: runs.whole(token))[:1]
    whole = attentions(lambda: runs.whole(token[:, :length], mask))
    steps = steps_of(attentions(lambda: runs.cached(token[:, :length], _SIZES, mask)), len(whole))
    if steps is None or not table or [s.size for s in steps] != list(_SIZES):
        return None
    known, right = table[0].query, whole[0].query
    if right.shape[:-2] != known.shape[:-2] or rows_of(known, known) != list(range(longest)):
        return None
    wanted = rows_of(right, known)
    for number, step in enumerate(steps):
        query = step.layers[0].query
        if query.shape[:-2] != known.shape[:-2]:
            return None
        skip = max(0, _PADS - step.start)
        got, there = rows_of(query, known)[skip:], wanted[step.start + skip : step.start + step.size]
        if -1 in got or -1 in there:
            return None
        if got != there:
            told = (
                f"behind {_PADS} padded positions the real tokens of chunk {number + 1} stand at positions {got} with "
                f"the cache and at {there} in the whole batch"
            )
            if all(one - other == _PADS for one, other in zip(got, there, strict=True)):
                return f"{told}: with the cache positions count padded tokens too (all that is cached), else real ones"
            return told
    return None

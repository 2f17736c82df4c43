"""T5 biases inside a whole model; part of `anatomy.positions`."""

from __future__ import annotations

import torch
from torch import Tensor

from veriformer.properties.anatomy.attention import Attention, followed
from veriformer.properties.anatomy.flow import Flow, is_far
from veriformer.properties.anatomy.traced import Traced
from veriformer.properties.engine.case import Case
from veriformer.properties.formulas.relative_biases import wrong_buckets
from veriformer.reference.position_bias import t5_bucket

_SOLVED = 64
"""Positions up to which the numbers of the buckets are solved for; of more, they are averaged."""


def buckets_are_those_of_t5(case: Case, flowing: Flow) -> None:
    """Require that what is added to the scores of a self-attention is one number a head and bucket of T5."""
    known = _own(flowing.seen, flowing.length, flowing.other)
    if not known:
        case.does_not_apply("no attention of a sequence over itself could be followed from its scores to its weights")
    count, far = int(case.subject.fact("num_buckets", 32)), int(case.subject.fact("max_distance", 128))
    told, declares = case.subject.fact("bidirectional"), case.subject.declares
    if not {"num_buckets", "max_distance"} <= set(declares):
        case.does_not_apply("num_buckets and max_distance are not both declared")
    case.subject.fact("positions")  # what is asked for counts as verified
    case.witness()
    for number, attention in enumerate(known):
        is_causal = bool(attention.hidden.triu(1).any())
        both = (not is_causal) if told is None or flowing.other else bool(told)
        error = case.apply(bucket_misfit, flowing.seen, flowing.length, flowing.other, number, count, far, both)
        place = attention.place or "the model"
        case.require(
            error < 1e3 * flowing.limit,
            f"what is added to the scores in {place} is not one number a bucket of T5",
            got=f"{float(error):.3g} off",
            expected=f"the same in each of {count} {'two-sided' if both else 'one-sided'} buckets to {far}",
            error=error,
            tolerance=1e3 * flowing.limit,
            cause=lambda a=attention, b=both, p=place: _words(flowing, a, count, far, b, p),  # type: ignore[misc]
        )
        if not is_far(case) or not flowing.built.is_fresh:
            continue  # of weights that were given two may be equal
        alike = case.apply(alike_distances, flowing.seen, flowing.length, flowing.other, number, count, far, both)
        near, wide = (int(n) for n in alike)
        case.require(
            (alike == 0).all(),
            f"distances {near:+} and {wide:+} (key less query) have one bias in {place}, and not one bucket of T5",
            got=f"one number a head for distances {near:+} and {wide:+}",
            expected=f"another one in each of {count} buckets, up to distance {far}",
            cause=lambda a=attention, b=both, p=place, n=near, w=wide: (  # type: ignore[misc]
                _why_alike(a, count, far, b, p, flowing.limit)
                or f"in {p} distance {w:+} is the first that falls into the bucket of another, that of distance {n:+}"
            ),
        )


def _own(seen: Traced, length: int, other: int) -> list[Attention]:
    return [a for a in followed(seen) if a.is_over(length) or (other and a.is_over(other))]


def bucket_misfit(seen: Traced, length: int, other: int, number: int, count: int, far: int, both: bool) -> Tensor:
    """Return how far the bias of an attention is from one number a head and bucket, up to a constant a row."""
    return torch.tensor(_misfit(_own(seen, length, other)[number], count, far, both))


def alike_distances(seen: Traced, length: int, other: int, number: int, count: int, far: int, both: bool) -> Tensor:
    """Return two distances, key less query, of different buckets that share their bias, the least; 0 if none do."""
    attention = _own(seen, length, other)[number]
    bucket, visible = _buckets(attention.bias.shape[-1], count, far, both), ~attention.hidden[0]
    numbers, off = _by_bucket(attention, bucket, count)
    noise = torch.where(visible, off - numbers[:, bucket], 0.0).abs().amax()
    bound = 8 * noise + 1e-9 * numbers.abs().amax()  # numbers of one bucket differ by twice the noise at most
    at = torch.arange(len(bucket))
    distance = at[None, :] - at[:, None]
    seen_at = {b: distance[visible & (bucket == b)] for b in range(count)}
    first = {b: int(d[d.abs().argmin()]) for b, d in seen_at.items() if len(d)}
    same = (numbers[:, :, None] - numbers[:, None, :]).abs().amax(0) <= bound
    pairs = [sorted((first[a], first[b]), key=abs) for a in first for b in first if b < a and bool(same[a, b])]
    return torch.tensor(min(pairs, key=lambda p: abs(p[1]), default=[0, 0]))


def _buckets(length: int, count: int, far: int, both: bool) -> Tensor:
    """Return `[T, T]`: the bucket of each key for each query."""
    at = torch.arange(length)
    return t5_bucket(at[None, :] - at[:, None], bidirectional=both, num_buckets=count, max_distance=far)


def _by_bucket(attention: Attention, bucket: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the mean bias `[H, N]` of each bucket, and the bias `[H, T, T]`, both less that of a token for itself."""
    off = attention.bias - attention.bias.diagonal(dim1=1, dim2=2)[..., None]
    share = torch.zeros(bucket.numel(), count, dtype=off.dtype)
    share[torch.arange(len(share)), bucket.flatten()] = 1.0
    share *= ~attention.hidden[0].flatten()[:, None]
    return off.flatten(1) @ share / share.sum(0).clamp(min=1), off


def _misfit(attention: Attention, count: int, far: int, both: bool) -> float:
    return _off(attention, _buckets(attention.bias.shape[-1], count, far, both))


def _off(attention: Attention, bucket: Tensor) -> float:
    """Return how far a bias is from one number a head and bucket `[T, T]`, up to a constant a row."""
    length, seen, count = len(bucket), ~attention.hidden[0], int(bucket.max()) + 1
    if length > _SOLVED and bool(seen.diagonal().all()):
        found = _by_bucket(attention, bucket, count)
        return float(torch.where(seen, found[1] - found[0][:, bucket], 0.0).abs().amax())
    rows, _ = seen.nonzero().T
    share = torch.zeros(int(seen.sum()), count + length, dtype=torch.float64)
    share[torch.arange(len(share)), bucket[seen]] = 1.0
    share[torch.arange(len(share)), count + rows] = 1.0
    wanted = attention.bias[:, seen].T  # [N, H]
    found = torch.linalg.lstsq(share, wanted, driver="gelsd").solution
    return float((share @ found - wanted).abs().amax())


def _why_alike(attention: Attention, count: int, far: int, both: bool, place: str, limit: float) -> str | None:
    """Say by what rule, or for want of which, distances of different buckets share a bias."""
    if not bool(attention.bias.abs().amax() > 1e-9):
        told = f"nothing that a softmax keeps is added to the scores in {place}: no bias, or one number for all"
        past = "" if both else (
            ", as where all of the past falls into one bucket, that of distance 0, since the sign of the relative "
            "position (key less query) is turned round"
        )  # fmt: skip
        return told + past
    if not both and _misfit(attention, count, far, True) < 1e3 * limit:
        return (
            f"the buckets in {place} are two-sided, where one-sided ones are right: half of the {count} are left for "
            "keys that are never seen"
        )
    apart = not bool(attention.hidden[0].diagonal().any())  # without it buckets that are one are not told from others
    rules = rules_that_fit(attention, count, far, both, limit) if apart else []
    if 0 < len(rules) < 3:
        return f"in {place} {'; or else, the buckets being the same: '.join(rules)}"
    return None


def _words(flowing: Flow, attention: Attention, count: int, far: int, both: bool, place: str) -> str | None:
    limit, wide = flowing.limit, attention.bias.shape[-1]
    if _misfit(attention, count, far, not both) < 1e3 * limit:
        ways = ("one-sided", "two-sided")
        return f"the buckets in {place} are {ways[not both]}, where {ways[both]} ones are right"
    told = rules_that_fit(attention, count, far, both, limit)
    if len(told) > 1:
        longer = flowing.lengthened(4)
        same = [a for a in followed(longer) if (a.place, a.bias.shape[-1]) == (attention.place, 4 * wide)]
        told = [words for words in told if same and words in rules_that_fit(same[0], count, far, both, limit)]
    return f"in {place} {told[0]}" if told else None  # of rules that are one at these sizes the likeliest


def rules_that_fit(attention: Attention, count: int, far: int, both: bool, limit: float) -> list[str]:
    """Return the wrong rules that give a bias one number a bucket, another one in each."""
    at, seen = torch.arange(attention.bias.shape[-1]), ~attention.hidden[0]
    found = []
    for words, guess in wrong_buckets(at[None, :] - at[:, None], both, count, far):
        bucket = torch.zeros_like(guess)
        bucket[seen] = guess[seen].unique(return_inverse=True)[1]
        if _off(attention, bucket) >= 1e3 * limit:
            continue
        if not bool(seen.diagonal().all()) or _are_apart(attention, bucket, limit):
            found.append(words)
    return found


def _are_apart(attention: Attention, bucket: Tensor, limit: float) -> bool:
    """Whether no two buckets have one bias."""
    numbers = _by_bucket(attention, bucket, int(bucket.max()) + 1)[0]
    apart = (numbers[:, :, None] - numbers[:, None, :]).abs().amax(0)
    return bool((apart + torch.eye(len(apart)) > 1e3 * limit).all())

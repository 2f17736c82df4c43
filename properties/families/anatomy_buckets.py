"""T5 biases inside a whole model; part of `anatomy.positions`."""

from __future__ import annotations

import torch
from torch import Tensor

from veriformer.properties.anatomy.attention import Attention, followed
from veriformer.properties.anatomy.flow import Flow
from veriformer.properties.anatomy.traced import Traced
from veriformer.properties.engine.case import Case
from veriformer.reference.position_bias import t5_bucket


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
            cause=lambda a=attention, b=both, p=place: _words(a, count, far, b, p, flowing.limit),  # type: ignore[misc]
        )


def _own(seen: Traced, length: int, other: int) -> list[Attention]:
    return [a for a in followed(seen) if a.is_over(length) or (other and a.is_over(other))]


def bucket_misfit(seen: Traced, length: int, other: int, number: int, count: int, far: int, both: bool) -> Tensor:
    """Return how far the bias of an attention is from one number a head and bucket, up to a constant a row."""
    return torch.tensor(_misfit(_own(seen, length, other)[number], count, far, both))


def _misfit(attention: Attention, count: int, far: int, both: bool) -> float:
    length = attention.bias.shape[-1]
    at = torch.arange(length)
    bucket = t5_bucket(at[None, :] - at[:, None], bidirectional=both, num_buckets=count, max_distance=far)
    seen = ~attention.hidden[0]
    rows, _ = seen.nonzero().T
    share = torch.zeros(int(seen.sum()), count + length, dtype=torch.float64)
    share[torch.arange(len(share)), bucket[seen]] = 1.0
    share[torch.arange(len(share)), count + rows] = 1.0
    wanted = attention.bias[:, seen].T  # [N, H]
    found = torch.linalg.lstsq(share, wanted, driver="gelsd").solution
    return float((share @ found - wanted).abs().amax())


def _words(attention: Attention, count: int, far: int, both: bool, place: str, limit: float) -> str | None:
    if _misfit(attention, count, far, not both) < 1e3 * limit:
        ways = ("one-sided", "two-sided")
        return f"the buckets in {place} are {ways[not both]}, where {ways[both]} ones are right"
    return None

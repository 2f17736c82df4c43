"""Relative biases: ALiBi and T5 buckets."""

from __future__ import annotations

import torch
from torch import Tensor

from veriformer.properties.bench.guards import SubjectError
from veriformer.properties.bench.measured import judged_dtypes
from veriformer.properties.bench.pool import Built
from veriformer.properties.causes.structure import off_the_record
from veriformer.properties.definitions.rounding import epsilon
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.premises import needs_fact
from veriformer.properties.engine.property import holds
from veriformer.properties.formulas.relative_biases import bucket_cause, is_geometric, slope_cause, slopes_by
from veriformer.reference.position_bias import t5_bucket

_KIND = ("position_bias",)
_ALIBI = needs_fact("positions", "alibi")
_T5 = needs_fact("positions", "t5")


def _bias(case: Case, query_len: int, key_len: int) -> Tensor:
    built = case.built()
    return case.call(built, query_len, key_len).detach().cpu()


@holds(
    "position-bias.relative",
    statement="The bias depends on the distance of query and key alone, head by head.",
    formula="b_h(t, s) = g_h(s - t), up to a constant a row",
    source="Shaw et al. 2018; Press et al. 2022; Raffel et al. 2020, section 2.1.",
    kinds=_KIND,
    catches=("RB02", "bias-absolute"),
)
def the_bias_sees_distance_alone(case: Case) -> None:
    """Differences along a row are compared between rows: a constant a row, which softmax cancels, does not count.
    Query and key lengths differ, but for a bias that is made for equal ones. Of two lengths of queries and keys alike
    the shorter has the biases of the longer.
    """
    queries, keys = case.integer("T", 2, 9), case.integer("S", 3, 12)
    if case.subject.fact("equal_lengths"):
        queries = keys
    built = case.built()
    bias = case.call(built, queries, keys).detach().cpu()
    steps = bias.double()[..., 1:] - bias.double()[..., :-1]
    rows = []
    for t in range(1, queries):
        here, before = steps[:, t, 1:], steps[:, t - 1, :-1]
        finite = here.isfinite() & before.isfinite()
        rows.append((torch.where(finite, here, 0), torch.where(finite, before, 0)))
    got, expected = torch.stack([r[0] for r in rows]), torch.stack([r[1] for r in rows])
    largest = float(bias[bias.isfinite()].abs().amax())
    case.close(
        got,
        expected,
        "the bias of a pair changes when query and key move together",
        bound=8 * epsilon(bias.dtype) * max(largest, 1.0),
        constants_allowed=True,
    )
    _is_of_any_length(case, built, case.integer("short", 3, 6), case.integer("more", 1, 5))
    if bool((steps[steps.isfinite()] != 0).any()):
        case.witness()


def _is_of_any_length(case: Case, built: Built, short: int, more: int) -> None:
    """Require that a distance has one bias at two lengths, up to a constant a row."""
    try:
        one, other = (case.call(built, n, n).detach().cpu().double() for n in (short, short + more))
    except SubjectError:  # a length that it is not made for
        return
    steps = [x[..., 1:] - x[..., :-1] for x in (one, other[:, :short, :short])]
    seen = steps[0].isfinite() & steps[1].isfinite()
    got, expected = (torch.where(seen, x, 0) for x in steps)
    largest = float(one[one.isfinite()].abs().amax())
    case.close(
        got, expected, f"at lengths {short} and {short + more} one distance has two biases",
        bound=8 * epsilon(built.dtype) * max(largest, 1.0), constants_allowed=True,
        cause=lambda: _length_cause(one, other),
    )  # fmt: skip


def _length_cause(one: Tensor, other: Tensor) -> str | None:
    """Say by how many entries a table is read elsewhere at another length, where that explains all of it."""
    short, longer = one.shape[-1], other.shape[-1]
    rows = {d: one[:, max(-d, 0), max(d, 0)] for d in range(1 - short, short)}
    for step in (n for k in range(1, longer) for n in (k, -k)):
        pairs = [(rows[d], other[:, max(-d - step, 0), max(d + step, 0)]) for d in rows if abs(d + step) < longer]
        if len(pairs) >= short and all(bool((a == b).all()) for a, b in pairs):
            return (
                f"at length {short} a distance d has the bias that d {'+' if step > 0 else '-'} {abs(step)} has at "
                f"length {longer}: a table is read from a place that goes by the call's length, not from its middle"
            )
    return None


@holds(
    "alibi.slopes",
    statement="The slopes are 2^(-8 i / h), and for other numbers of heads the published interleaving.",
    formula="b_h(t, s) = -m_h |t - s| (past), m_i = 2^(-8 i / H)",
    source="Press et al. 2022, section 3, and the authors' code for numbers of heads that are no power of two.",
    kinds=_KIND,
    level="extended",
    unless=_ALIBI,
    catches=("RB01", "RB02"),
)
def slopes_are_the_published_ones(case: Case) -> None:
    """Read off the past: one step further back costs the slope. Slopes of 12 or 40 heads are not monotone by design."""
    bias = _bias(case, 6, 6).double()
    last = bias[:, -1]
    slopes = (last[:, 1:] - last[:, :-1])[:, :-1].mean(dim=1)
    rule = case.subject.fact("slopes")
    expected = slopes_by(rule, bias.shape[0])
    case.generator  # noqa: B018 - the seed is drawn, so that a replay has it
    case.close(
        slopes,
        expected,
        "the slopes are not those of the paper",
        bound=16 * epsilon(case.built().dtype),
        cause=lambda: slope_cause(slopes, expected),
        asks=("slopes", "geometric") if is_geometric(slopes) else None,
    )
    case.witness()


@holds(
    "alibi.monotone",
    statement="Further back is never favoured.",
    formula="b_h(t, s) >= b_h(t, s') for s' < s <= t",
    source="Press et al. 2022, section 3: a penalty that grows with distance.",
    kinds=_KIND,
    level="extended",
    unless=_ALIBI,
    catches=("alibi-sign",),
)
def distance_is_penalised(case: Case) -> None:
    """Slopes are positive. Up to a constant a row, the bias must strictly increase towards the query."""
    length = case.integer("T", 2, 12)
    last = _bias(case, length, length).double()[:, -1]
    steps = last[:, 1:] - last[:, :-1]
    worst = steps.amin()
    case.require(worst > 0, "a key further back gets a larger bias", got=f"a step of {worst:.3g}", expected="above 0",
                 cause=lambda: slope_cause(steps.mean(1), slopes_by(None, len(steps)))
                 )  # fmt: skip
    case.witness()


@holds(
    "t5.buckets",
    statement="Distances share a bias exactly where the published bucket rule puts them in one bucket.",
    formula="b_h(t, s) = b_h(t', s')  <=>  bucket(s - t) = bucket(s' - t')",
    source="Raffel et al. 2020, section 2.1, and the authors' code.",
    kinds=_KIND,
    level="extended",
    unless=(_T5, needs_fact("bidirectional")),
    catches=("RB04",),
)
def distances_share_buckets_as_published(case: Case) -> None:
    """Read off the bias of one query row: two keys have the same bias if and only if their distances share a bucket.
    Exact below the threshold, logarithmic above, all alike beyond max_distance, the future apart if bidirectional.
    """
    length = case.choice("T", (20, 60, 150))
    at = case.integer("t", 0, length - 1)
    bias = _bias(case, length, length)[:, at].double()
    bucket = t5_bucket(
        torch.arange(length) - at,
        bidirectional=bool(case.subject.fact("bidirectional")),
        num_buckets=int(case.subject.fact("num_buckets", 32)),
        max_distance=int(case.subject.fact("max_distance", 128)),
    )
    same_bias = (bias[:, :, None] == bias[:, None, :]).all(dim=0)
    same_bucket = bucket[:, None] == bucket[None, :]
    wrong = (same_bias != same_bucket).nonzero()
    said = ""
    if len(wrong):
        a, b = (int(i) - at for i in wrong[0])
        said = f"distances {a} and {b} {'share' if same_bias[tuple(wrong[0])] else 'do not share'} a bias"
    case.require(
        (same_bias == same_bucket).all(),
        "distances are put into other buckets than published",
        got=said,
        expected="the published rule",
        cause=lambda: _bucket_cause(case),
    )
    case.witness()


def _viewed(case: Case) -> str | None:
    """Say that heads and positions are mixed: in another order of axes the numbers go with the distance."""
    length = 7
    for config in case.bench.buildable():
        if config.num_heads == 1:
            continue
        bias = case.call(case.bench.pool.get(config, judged_dtypes(case.bench)[-1]), length, length).detach()
        heads = bias.shape[0]
        for order, read in (
            ("[T, S, H]", bias.reshape(length, length, heads).permute(2, 0, 1)),
            ("[T, H, S]", bias.reshape(length, heads, length).permute(1, 0, 2)),
        ):
            if not _goes_with_distance(bias) and _goes_with_distance(read):
                return (
                    f"in the order {order} the numbers are biases of distances: what is made in that order is viewed "
                    "as [H, T, S], where its axes must be permuted; heads and positions are mixed up"
                )
    return None


def _goes_with_distance(bias: Tensor) -> bool:
    """Whether a bias `[H, T, S]` is the same for all pairs of one distance."""
    return bool(torch.allclose(bias[:, 1:, 1:], bias[:, :-1, :-1]))


def _bucket_cause(case: Case) -> str | None:
    farthest = int(case.subject.fact("max_distance", 128))
    length = min(farthest * 3 // 2 + 32, 400)  # where a bucket beyond the last would be reached
    with off_the_record(case):
        built = case.bench.pool.get(case.config(), judged_dtypes(case.bench)[-1])
        bias = case.call(built, length, length).detach().cpu().double()
        if told := _viewed(case):
            return told
    buckets, both = int(case.subject.fact("num_buckets", 32)), bool(case.subject.fact("bidirectional"))
    return bucket_cause(bias, both, buckets, farthest)

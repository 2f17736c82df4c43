"""Wrong rules of relative biases: T5's buckets and ALiBi's slopes, and which of them a bias follows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from veriformer.reference.position_bias import alibi_slopes, t5_bucket

_RULE = {"floor": torch.floor, "ceil": torch.ceil, "round": torch.round}

_GEOMETRIC = "2^(-8i/h) although h is no power of two"

Clamp = Callable[[Tensor, Tensor, int], Tensor]


def _late(bucket: Tensor, offset: Tensor, buckets: int) -> Tensor:
    return (offset + bucket).clamp(max=buckets - 1)


def _halved_late(bucket: Tensor, offset: Tensor, buckets: int) -> Tensor:
    return (offset + bucket).clamp(max=buckets // 2 - 1)


def _one_more(bucket: Tensor, offset: Tensor, buckets: int) -> Tensor:
    return (offset + bucket.clamp(max=buckets // 2)).clamp(max=buckets - 1)


def _open(bucket: Tensor, offset: Tensor, buckets: int) -> Tensor:
    return offset + bucket


def _bucket(
    relative: Tensor,
    both: bool,
    buckets: int,
    farthest: int,
    *,
    start: Callable[[int, int], float] | None = None,
    exactly: Callable[[int], int] = lambda n: n // 2,
    halved: bool = True,
    rule: str = "floor",
    last: int = 1,
    step: int = 0,
    absolute: bool = False,
    clamped: Clamp | None = None,
    spread_over: Callable[[int, int, int], int] = lambda whole, own, exact: own - exact,
    whole_ratio: bool = False,
    cut_early: bool = False,
    base: float = 1.0,
) -> Tensor:
    """Return T5's buckets with one of its parts another: what the logarithm starts at, where it starts, how it ends."""
    bucket = torch.zeros_like(relative)
    whole = buckets
    if both:
        buckets = buckets // 2 if halved else buckets
        bucket = bucket + (relative > 0).long() * (whole // 2)
    distance = relative.abs() if both or absolute else (-relative).clamp(min=0)
    distance = distance + step * (distance > 0).long()
    exact = max(exactly(buckets), 1)
    span = math.log(farthest / (start(buckets, exact) if start else exact))
    share = distance.clamp(min=1).double() / exact
    ratio = (share.floor().clamp(min=1) if whole_ratio else share).log() / span
    ratio = (ratio.floor() if cut_early else ratio) * base
    spread = spread_over(whole, buckets, exact)
    far = exact + _RULE[rule](ratio * spread + (1e-9 if rule == "floor" else 0)).long()
    if clamped is not None:
        return clamped(torch.where(distance < exact, distance, far), bucket, whole)
    return bucket + torch.where(distance < exact, distance, far.clamp(max=buckets - last))


def wrong_buckets(relative: Tensor, both: bool, buckets: int, farthest: int) -> Iterator[tuple[str, Tensor]]:
    """Yield wrong rules in words, each with the buckets that it gives.

    Args:
        relative: int64, key position minus query position.
        both: whether past and future are told apart.
        buckets: in all.
        farthest: distance that reaches the last bucket.
    """
    sided = "the whole past falls into one bucket and the future is told apart"
    swapped = t5_bucket(-relative, bidirectional=both, num_buckets=buckets, max_distance=farthest)
    yield f"the sign of the distance is swapped (query minus key{'' if both else ': ' + sided})", swapped
    yield (
        f"the bias behaves as if bidirectional were {not both}",
        t5_bucket(relative, bidirectional=not both, num_buckets=buckets, max_distance=farthest),
    )
    if not both:
        yield (
            "past and future share buckets: the absolute distance is taken",
            _bucket(relative, both, buckets, farthest, absolute=True),
        )
    for words, start in (
        ("log(max_distance / num_buckets)", lambda n, exact: n),
        ("log(max_distance)", lambda n, exact: 1),
        ("log(max_distance / (max_exact - 1))", lambda n, exact: max(exact - 1, 1)),
        ("log(max_distance / (max_exact + 1))", lambda n, exact: exact + 1),
        ("log(max_distance / (num_buckets - max_exact - 1))", lambda n, exact: max(n - exact - 1, 1)),
    ):
        if farthest > start(buckets // 2 if both else buckets, max(buckets // 4 if both else buckets // 2, 1)):
            told = f"the logarithm of the distance is divided by {words} instead of log(max_distance / max_exact)"
            yield told, _bucket(relative, both, buckets, farthest, start=start)
    for own, ranges, base in (("2", "e", 1 / math.log(2)), ("e", "2", math.log(2)), ("10", "e", 1 / math.log(10)),
                              ("e", "10", math.log(10))):  # fmt: skip
        told = f"the logarithm of the distance is to base {own} and that of the range it is divided by to base {ranges}"
        yield told, _bucket(relative, both, buckets, farthest, base=base)
    told = "the distance is divided by max_exact to a whole number, before its logarithm is taken"
    yield told, _bucket(relative, both, buckets, farthest, whole_ratio=True)
    told = "the share of the logarithmic range is cut to a whole number before it is multiplied by the buckets of it"
    yield (
        f"{told}: all distances below max_distance share one",
        _bucket(relative, both, buckets, farthest, cut_early=True),
    )
    if both:
        told = "the number of buckets is not halved before half of them are made exact"
        yield told, _bucket(relative, both, buckets, farthest, halved=False)
        told = "the logarithmic buckets are spread over all of them, not over the half that one direction has"
        yield told, _bucket(relative, both, buckets, farthest, spread_over=lambda whole, own, exact: whole - exact)
        told = (
            "the direction is asked for after the absolute value is taken, or never: past and future share all buckets"
        )
        yield told, _bucket(relative.abs(), both, buckets, farthest)
        for words, end in (
            ("to num_buckets - 1 after the offset of the future is added, not to num_buckets / 2 - 1 before it", _late),
            ("to num_buckets / 2, one too far, not to num_buckets / 2 - 1", _one_more),
        ):
            told = f"the logarithmic bucket is clamped {words}: far keys of the past run over into those of the future"
            yield told, _bucket(relative, both, buckets, farthest, clamped=end)
    yield from _other_clamps(relative, both, buckets, farthest)
    told = "the logarithmic buckets are spread over num_buckets, not over the num_buckets - max_exact that remain"
    yield told, _bucket(relative, both, buckets, farthest, spread_over=lambda whole, own, exact: own)
    for words, exactly in (
        ("a quarter", lambda n: n // 4),
        ("all but one", lambda n: n - 1),
        ("a third", lambda n: n // 3),
    ):
        yield f"{words} of the buckets are exact, not half", _bucket(relative, both, buckets, farthest, exactly=exactly)
    for rule in ("ceil", "round"):
        yield (
            f"the logarithmic bucket is rounded ({rule}) instead of cut off (floor)",
            _bucket(relative, both, buckets, farthest, rule=rule),
        )
    yield (
        "the last bucket is never reached: buckets end one too early",
        _bucket(relative, both, buckets, farthest, last=2),
    )
    yield "every distance is counted one too far", _bucket(relative, both, buckets, farthest, step=1)
    yield (
        "every distance is counted one too short: the least distance of a bucket falls into the one before (bucketize "
        "without right=True, or > for >=)",
        _bucket(relative, both, buckets, farthest, step=-1),
    )
    for other in sorted({buckets // 2, 2 * buckets, buckets - 1, buckets + 1, 16, 32, 64} - {buckets}):
        if other > 3 and farthest > (other // 4 if both else other // 2):
            told = f"there are {other} buckets instead of {buckets}"
            yield told, t5_bucket(relative, bidirectional=both, num_buckets=other, max_distance=farthest)
    # half of max_distance is what log(max_distance / num_buckets) comes to
    for other in sorted({2 * farthest, buckets * 4, 32, 64, 128, 256} - {farthest, farthest // 2}):
        if other > buckets:
            told = f"the last bucket begins at distance {other} instead of {farthest} (max_distance)"
            yield told, t5_bucket(relative, bidirectional=both, num_buckets=buckets, max_distance=other)
    yield "buckets of equal width stand in place of logarithmic ones", _linear(relative, both, buckets, farthest)
    early = " (as where half of all buckets are made exact before they are halved for two directions)" if both else ""
    yield f"there are no logarithmic buckets: distances are clipped{early}", _clipped(relative, both, buckets)


def _other_clamps(relative: Tensor, both: bool, buckets: int, farthest: int) -> Iterator[tuple[str, Tensor]]:
    """Yield what becomes of buckets that are clamped to the number of another case, or not at all."""
    if both:
        yield (
            "buckets are clamped to num_buckets / 2 - 1 after the offset of the future is added, not before it: every "
            "key of the future falls into one bucket, the last one of the past",
            _bucket(relative, both, buckets, farthest, clamped=_halved_late),
        )
        yield (
            "the logarithmic bucket is not clamped to num_buckets / 2 - 1 before the offset of the future is added "
            "(not at all, or to the full number): far keys run over into buckets behind the last of their direction",
            _bucket(relative, both, buckets, farthest, clamped=_open),
        )
        return
    yield (
        "the logarithmic bucket is not clamped to num_buckets - 1: beyond max_distance further buckets begin",
        _bucket(relative, both, buckets, farthest, clamped=_open),
    )
    yield (
        "the logarithmic bucket is clamped to num_buckets, one too far, not to num_buckets - 1",
        _bucket(relative, both, buckets, farthest, last=0),
    )
    yield (
        "buckets are clamped to num_buckets / 2 - 1 as if they were for two directions: all far keys share the last "
        "exact one",
        _bucket(relative, both, buckets, farthest, last=buckets - buckets // 2 + 1),
    )


def _linear(relative: Tensor, both: bool, buckets: int, farthest: int) -> Tensor:
    buckets = buckets // 2 if both else buckets
    distance = relative.abs() if both else (-relative).clamp(min=0)
    bucket = (relative > 0).long() * buckets if both else torch.zeros_like(relative)
    return bucket + (distance * buckets // farthest).clamp(max=buckets - 1)


def _clipped(relative: Tensor, both: bool, buckets: int) -> Tensor:
    side = buckets // 2 if both else buckets
    distance = relative.abs() if both else (-relative).clamp(min=0)
    return ((relative > 0).long() * side if both else 0) + distance.clamp(max=side - 1)


def bucket_cause(bias: Tensor, both: bool, buckets: int, farthest: int) -> str | None:
    """Name the one wrong rule under which pairs share a bias exactly where they share a bucket.

    Args:
        bias: `[H, T, T]`, long enough that the last bucket is reached.
        both: whether past and future are told apart.
        buckets: declared number.
        farthest: declared distance of the last bucket.
    """
    length = bias.shape[-1]
    rows = sorted({0, length // 2, length - 1})
    relative = torch.stack([torch.arange(length) - at for at in rows])
    seen = _partition(torch.stack([bias[:, at] for at in rows], dim=1).flatten(1))
    right = t5_bucket(relative, bidirectional=both, num_buckets=buckets, max_distance=farthest)
    fits = [
        words
        for words, guess in wrong_buckets(relative, both, buckets, farthest)
        if torch.equal(_partition(guess.flatten()[None]), seen)
    ]
    if torch.equal(_partition(right.flatten()[None]), seen):
        return None
    if fits and fits[-1].startswith("there are no logarithmic buckets"):
        # several wrong numbers come to that, and some wrong rules where there are few buckets
        rules = [words for words in fits[:-1] if not words.startswith(("there are", "the last bucket begins"))]
        return "; or else, the buckets being the same: ".join([fits[-1], *rules[:2]])
    if 0 < len(fits) < 3:
        return f"{fits[0]}{f'; or else, the buckets being the same: {fits[1]}' if len(fits) == 2 else ''}"
    past = where_buckets_begin(bias, right[-1])
    return past or _where_they_part(bias[:, 0], right[0], "future") or _shared_by_both(bias[:, length // 2], right[1])


def where_buckets_begin(bias: Tensor, rule: Tensor) -> str | None:
    """Say at which distances into the past a new bucket begins, there and by rule.

    Args:
        bias: `[H, T, T]`.
        rule: `[T]`: the buckets of the last row.
    """
    return _where_they_part(bias[:, -1].flip(-1), rule.flip(-1), "past")


def _where_they_part(seen: Tensor, right: Tensor, side: str) -> str | None:
    """Say where buckets begin, of a bias `[H, T]` by distance."""
    begins = [d for d in range(1, len(right)) if not torch.equal(seen[:, d], seen[:, d - 1])]
    wanted = [d for d in range(1, len(right)) if int(right[d]) != int(right[d - 1])]
    if begins == wanted:
        return None
    same = next(
        (n for n, (a, b) in enumerate(zip(begins, wanted, strict=False)) if a != b), min(len(begins), len(wanted))
    )
    if same > 8:  # the long list of those that are right would hide the others
        begins, wanted = begins[same - 1 :], wanted[same - 1 :]
    return f"into the {side}, buckets begin at distances {_listed(begins)}, by the rule at {_listed(wanted)}"


def _shared_by_both(seen: Tensor, right: Tensor) -> str | None:
    """Name the first distances, one into the past and one into the future, that share a bucket wrongly, or do not."""
    at = seen.shape[-1] // 2
    wrong = (_partition(seen) != (right[:, None] == right[None, :])).nonzero()
    crossing = [(at - a, b - at) for a, b in wrong.tolist() if a < at <= b]
    if not crossing:
        return None
    past, future = min(crossing, key=sum)
    shares = bool((seen[:, at - past] == seen[:, at + future]).all())
    told = "a bucket of one side is that of the other" if shares else "they are kept apart"
    return (
        f"each side begins its buckets where it should, but {past} into the past and {future} into the future "
        f"{'share one, by the rule they do not' if shares else 'do not share one, by the rule they do'}: {told}"
    )


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:12])) + (" ..." if len(numbers) > 12 else "") if numbers else "none"


def _partition(columns: Tensor) -> Tensor:
    """Return `[N, N]`: which columns are equal."""
    return (columns[:, :, None] == columns[:, None, :]).all(dim=0)


def slope_cause(slopes: Tensor, expected: Tensor) -> str | None:
    """Name the rule that gives slopes `[H]` that are not the published ones."""
    heads = len(slopes)
    index = torch.arange(1, heads + 1, dtype=torch.float64)
    for words, guess in (
        (
            _GEOMETRIC
            if heads & (heads - 1)
            else f"those of {heads} heads: of a part of them, made for that part alone",
            2.0 ** (-8 * index / heads),
        ),
        ("2^(-8i/h) with i from 0: the first slope is 1", 2.0 ** (-8 * (index - 1) / heads)),
        ("the negative of the right ones: further is favoured", -expected),
        ("those of the paper in the reverse order of heads", expected.flip(0)),
        ("2^(-i): the exponent 8/h is missing", 2.0**-index),
        ("2^(-8/h) in every head: the head's number is missing", (2.0 ** (-8 / torch.tensor(heads))).expand(heads)),
        ("e^(-8i/h): the base is e instead of 2", (-8 * index / heads).exp()),
        ("2^(-i/h): the factor 8 is missing", 2.0 ** (-index / heads)),
        ("2^(-4i/h): the factor is 4 instead of 8", 2.0 ** (-4 * index / heads)),
        ("2^(8i/h): the exponent has the wrong sign", 2.0 ** (8 * index / heads)),
        ("8i/h: the power of 2 is missing", 8 * index / heads),
        ("2^(-8i/(h+1))", 2.0 ** (-8 * index / (heads + 1))),
        ("2^(-8i/(h-1)) with i from 0: the ends are included", 2.0 ** (-8 * (index - 1) / max(heads - 1, 1))),
        ("1/i", 1 / index),
        ("all 0: there is no bias", torch.zeros(heads)),
    ):
        if float((slopes - guess).abs().amax()) < 1e-5:
            return f"the slopes are {words}"
    for part in range(1, heads):
        if heads % part == 0 and float((slopes - slopes_by(None, part).repeat(heads // part)).abs().amax()) < 1e-5:
            return f"the slopes are those of {part} heads, again and again: made for each part of the heads by itself"
    if told := _further_slopes(slopes):
        return told
    ratio = slopes / expected
    if float((ratio - ratio[0]).abs().amax()) < 1e-4 * abs(float(ratio[0])):
        return f"all slopes are {float(ratio[0]):.4g} times those of the paper"
    if torch.allclose(slopes.sort().values, expected.sort().values, atol=1e-5):
        return "the slopes are those of the paper in another order of heads"
    return None


def _further_slopes(slopes: Tensor) -> str | None:
    """Name the slip in the slopes of heads beyond a power of two."""
    heads = len(slopes)
    count = 2 ** (heads.bit_length() - 1)
    more = heads - count
    if not more:
        return None
    usual, longer = (slopes_by("geometric", n) for n in (count, 2 * count))
    begins = f"beyond {count} heads the further slopes are"
    for words, guess in (
        (f"{begins} from the odd places of the list for {2 * count} heads, which repeat slopes that are there, and not "
         "from its even ones (1::2 for 0::2)", torch.cat([usual, longer[1::2][:more]])),
        (f"{begins} the first of the list for {2 * count} heads, not every second of it",
         torch.cat([usual, longer[:more]])),
        (f"the slopes are the odd places of the list for {2 * count} heads and then the even ones, where the order is "
         "the other (1::2, then 0::2)", torch.cat([longer[0::2], longer[1::2]])[:heads]),
        (f"{begins} the first ones again", torch.cat([usual, usual[:more]])),
        (f"the slopes are the first {heads} of the list for {2 * count} heads", longer[:heads]),
    ):  # fmt: skip
        if float((slopes - guess).abs().amax()) < 1e-5:
            return words
    return None


def slopes_by(rule: str | None, num_heads: int) -> Tensor:
    """Return the slope of each head.

    Args:
        rule: "geometric": 2^(-8 i / H), i = 1..H, of any number of heads; else the interleaving of two powers of two.
        num_heads: H >= 1.

    Returns:
        float64 `[H]`.

    Source: Press et al. 2022, section 3, has the geometric one for any H; its authors' code interleaves.

    >>> slopes_by("geometric", 2).tolist() == slopes_by(None, 2).tolist() == [0.0625, 0.00390625]
    True
    """
    if rule == "geometric":
        return 2.0 ** (-8 * torch.arange(1, num_heads + 1, dtype=torch.float64) / num_heads)
    return torch.tensor(alibi_slopes(num_heads), dtype=torch.float64)


def is_geometric(slopes: Tensor) -> bool:
    """Whether slopes `[H]` are 2^(-8 i / H), up to rounding in float32."""
    return bool((slopes - slopes_by("geometric", len(slopes))).abs().amax() < 1e-5)

"""Which mean and which variance a norm used: read off its answers, an affine map of each token, and told in words."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

_LIMIT = 2e-4
"""A variance has twice the rounding of float32 tokens of a hundred channels, and eps is below a millionth of it."""

_OF_TWO = (
    (0.25, ", as where the distance is taken from the mean of both, which is updated too early"),
    (2.0, ", as where its square is weighed by the size of one of them, not by n m / (n + m)"),
    (4.0, ", as where its square is weighed by the size of both, not by n m / (n + m)"),
)
"""Of shards of one size that are joined two by two: the factor of a slip, and the slip."""


def variance_cause(x: Tensor, y: Tensor, centred: bool) -> str | None:
    """Name the mean and the variance that the answers imply, where the variance is another one than it should be.

    Args:
        x: `[N, D]`, far above eps.
        y: `[N, D]` answers with gain 1 and bias 0, float64.
        centred: whether the mean is to be subtracted, and the variance taken about it.
    """
    used = _used(x, y)
    if used is None:
        return None
    middle, spread = used
    ratio = spread / _spread(x, centred)
    told = _means(x, middle, centred)
    if told is None or _is_one(ratio):
        return None
    what = "the variance" if centred else "the mean square"
    return next((f"{told}, {what} {words}" for words in _variances(x, spread, centred)), None)


def variance_factor(x: Tensor, y: Tensor, centred: bool) -> str | None:
    """Say which of mean and variance is off, and by how much: for answers that no known slip gives.

    Args:
        x: `[N, D]`, far above eps.
        y: `[N, D]` answers with gain 1 and bias 0, float64.
        centred: whether the mean is to be subtracted, and the variance taken about it.
    """
    used = _used(x, y)
    if used is None:
        return None
    middle, spread = used
    told, ratio = _means(x, middle, centred), spread / _spread(x, centred)
    what = "the variance" if centred else "the mean square"
    is_right = _is_one(ratio)
    if told is None:
        off = "another number than the mean over the channels" if centred else "a number, which RMSNorm does not"
        return f"tokens are divided by what they should be, but {off} is subtracted" if is_right else None
    return None if is_right else f"{told}, {what} is not: {_range(ratio)} of it"


def _used(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return what was subtracted and the square of what was divided by, `[N]` each; None for no such map."""
    inner, outer = (z - z.mean(-1, keepdim=True) for z in (x, y))
    slope = (inner * outer).sum(-1) / inner.square().sum(-1)
    if not bool((slope > 0).all()) or float((outer - slope[:, None] * inner).abs().max()) > _LIMIT:
        return None
    return x.mean(-1) - y.mean(-1) / slope, slope.pow(-2)


def _spread(x: Tensor, centred: bool) -> Tensor:
    return (x - x.mean(-1, keepdim=True) if centred else x).square().mean(-1)


def _is_one(ratio: Tensor) -> bool:
    return float((ratio - 1).abs().max()) < _LIMIT


def _range(ratio: Tensor) -> str:
    low, high = f"{float(ratio.min()):.3g}", f"{float(ratio.max()):.3g}"
    return low if low == high else f"{low} to {high}"


def _means(x: Tensor, middle: Tensor, centred: bool) -> str | None:
    """Say that the mean is the right one, where it is."""
    right = x.mean(-1) if centred else torch.zeros_like(middle)
    if float((middle - right).abs().max()) > _LIMIT * float(_spread(x, centred).max().sqrt()):
        return None
    return "the mean is that of all channels" if centred else "no mean is subtracted"


def _variances(x: Tensor, spread: Tensor, centred: bool) -> Iterator[str]:
    width = x.shape[-1]
    ratio = spread / _spread(x, centred)
    if _is_one(ratio / ratio[0]):
        yield f"is {float(ratio[0]):.4g} times what it should be"
    if _is_one(spread / _spread(x, not centred)):
        yield "is taken about 0 instead of the mean" if centred else "is taken about the mean instead of 0"
    for count in range(1, width):
        for name, some in (("first", x[:, :count]), ("last", x[:, -count:])):
            alone = f"is that of the {name} {count} of {width} channels alone"
            if _is_one(spread / _spread(some, centred)):
                yield alone
            if centred and _is_one(spread / (some - x.mean(-1, keepdim=True)).square().mean(-1)):
                yield f"{alone}, about the mean of all"
    for of, parts in _partitions(x):
        if words := _of_parts(parts, spread, centred, of):
            yield words
    if centred:
        yield from _joined_in_turn(x, spread)


_WEIGHTS: tuple[tuple[str, Callable[[int, int], float]], ...] = (
    ("m m / (n + m)", lambda n, m: m * m / (n + m)),
    ("n n / (n + m)", lambda n, m: n * n / (n + m)),
    ("m", lambda n, m: m),
    ("n", lambda n, m: n),
    ("n m", lambda n, m: n * m),
    ("m / (n + m)", lambda n, m: m / (n + m)),
    ("n m m / (n + m)^2, as where the distance is taken from the new mean", lambda n, m: n * m * m / (n + m) ** 2),
    ("n n m / (n + m)^2, as where the distance is taken from the new mean", lambda n, m: n * n * m / (n + m) ** 2),
    ("n^3 m / (n + m)^3, as where it is taken after the mean has moved", lambda n, m: n**3 * m / (n + m) ** 3),
    ("m^3 n / (n + m)^3, as where it is taken after the mean has moved", lambda n, m: m**3 * n / (n + m) ** 3),
)
"""By what the square of how far the mean of m more channels lies from that of n is weighed, not by n m / (n + m)."""


def _joined_in_turn(x: Tensor, spread: Tensor) -> Iterator[str]:
    """Yield how pieces of channels that are joined one after another are weighed, where that gives the variance."""
    width = x.shape[-1]
    for size in range(1, width):
        pieces = x.split(size, -1)
        for weight, of in _WEIGHTS:
            count, mean, total = pieces[0].shape[-1], pieces[0].mean(-1), _spread(pieces[0], True) * pieces[0].shape[-1]
            for piece in pieces[1:]:
                more, apart = piece.shape[-1], piece.mean(-1) - mean
                total = total + _spread(piece, True) * more + apart.square() * of(count, more)
                mean, count = mean + apart * more / (count + more), count + more
            if _is_one(spread * width / total):
                yield (
                    f"is that of pieces of {size} channels joined one after another, with the square of how far the "
                    f"mean of m more lies from that of the n before weighed by {weight}, not by n m / (n + m)"
                )


def _partitions(x: Tensor) -> Iterator[tuple[str, list[Tensor]]]:
    """Yield ways to share channels among 2, 3, ... shards, in words: neighbours together, or each in turn."""
    width = x.shape[-1]
    for count in range(2, width // 2 + 1):
        shards = list(x.chunk(count, -1))
        if len(shards) == count:
            sizes = sorted({shard.shape[-1] for shard in shards}, reverse=True)
            yield f"{count} shards of {' or '.join(map(str, sizes))} channels", shards
        if width % count == 0:
            dealt = [x[:, start::count] for start in range(count)]
            yield f"{count} shards of {width // count} channels dealt out in turn", dealt


def _of_parts(parts: list[Tensor], spread: Tensor, centred: bool, of: str) -> str | None:
    """Tell by how much the spread within the shards enters, and that between their means."""
    width = sum(part.shape[-1] for part in parts)
    own = [_spread(part, centred) for part in parts]
    roots = torch.stack([one.sqrt() for one in own]).mean(0)
    root = "standard deviations" if centred else "roots"
    if _is_one(spread / roots.square()):
        return f"is the square of the mean of the {root} of {of}"
    if not centred:
        return None
    within = torch.stack([part.shape[-1] * one for part, one in zip(parts, own, strict=True)]).sum(0) / width
    between = _spread(torch.cat(parts, -1), centred) - within
    weights = torch.linalg.lstsq(torch.stack([within, between], -1), spread[:, None]).solution[:, 0]
    if not _is_one((weights[0] * within + weights[1] * between) / spread):
        return None
    inner, outer = (float(weight) for weight in weights)
    unbiased = width / (width - len(parts))
    apart = (
        "how far the shards' means lie apart is left out"
        if abs(outer) < 10 * _LIMIT
        else f"how far the shards' means lie apart enters {outer:.3g} times"
    )
    pairs = len(parts) & (len(parts) - 1) == 0  # joined two by two, each of as many channels as the other
    if pairs and len({part.shape for part in parts}) == 1:
        apart += next((words for factor, words in _OF_TWO if abs(outer - factor) < 10 * _LIMIT), "")
    if abs(inner - 1) < 10 * _LIMIT:
        return f"is the mean of those of {of}: {apart}"
    if abs(inner - unbiased) < 10 * _LIMIT:
        return f"is the mean of those of {of}, each divided by one less than its channels: {apart}"
    return f"is {inner:.3g} times the mean of those of {of}: {apart}"

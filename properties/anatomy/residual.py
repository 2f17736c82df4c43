"""How what a sublayer gives is added to the stream, told by its numbers: `stream = a x + b sublayer(...)`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from veriformer.properties.anatomy.traced import Traced, Value

_NEXT = 40  # values between a map's output and the sum that takes it: dropouts, norms, casts, a bias, another sublayer
_ONE = 1e-3
_SEEN = 1e-4  # of a branch: what is below rounding beside its stream has no factor that could be told
_AGAIN = 2  # sums behind one that may take the stream, or the branch, once more
_BACK = 160  # values before that the stream may be: a sublayer's own


@dataclass(frozen=True)
class Sum:
    """One sum of the stream and what a linear map gave.

    Attributes:
        place: path of the module whose map it is.
        stream: by which the stream is multiplied.
        branch: by which what is added is.
        product: number of the map's output among the values.
        when: number of the sum.
    """

    place: str
    stream: float
    branch: float
    product: int
    when: int


def residual_sums(seen: Traced, width: int) -> list[Sum]:
    """Return the sums of a stream of some width in a forward, in order."""
    found: list[Sum] = seen.once(("sums", width), lambda: _residual_sums(seen, width))
    return found


def _residual_sums(seen: Traced, width: int) -> list[Sum]:
    found = []
    for product in seen.products:
        if product.output.shape[-1] != width or product.right.shape[:-2].numel() > 1:
            continue
        if one := _sum_of(seen, product.when, product.place):
            found.append(one)
    return found


def _sum_of(seen: Traced, when: int, place: str) -> Sum | None:
    branch = _flat(seen.values[when].output)
    later = [v for v in seen.values[when + 1 : when + _NEXT] if v.output.numel() == branch.numel()]
    sums = [v for v in later if v.name in ("add", "sub")]  # what is subtracted is added with another sign
    streams = list(_streams(seen, when, branch.numel(), place)) if sums else []
    for total in sums:
        y = _flat(total.output)
        before = [_flat(v.output) for v in sums if v.when < total.when]
        biased = [b for b in before if _is_row_shift(b, branch, total.output.shape[-1], seen.limit)]
        first = None
        for b in (branch, *turned_rows(branch, total.output), *biased):
            for x, since, fit in _fitting(y, streams, b, seen.limit):
                first = first or fit
                if abs(fit[0] - 1) <= _ONE:
                    end, fit = _added_again(seen, [v for v in sums if v.when > total.when], x, b) or (total.when, fit)
                    return Sum(place, _multiple(seen, x, since, when) * fit[0], fit[1], when, end)
        if first:
            return Sum(place, *first, when, total.when)
    return None


def is_added(seen: Traced, made: Tensor, since: int, when: int, place: str) -> bool:
    """Whether a stream of before is added to what is no output of a map: to what a norm made of one, say.

    Args:
        seen: the trace of a forward.
        made: what is added.
        since: number of the value before which the stream was there.
        when: number of values that were made before `made` was.
        place: path of the module in which the branch begins.
    """
    branch = _flat(made)
    later = [v for v in seen.values[when : when + _NEXT] if v.name == "add" and v.output.numel() == branch.numel()]
    streams = list(_streams(seen, since, branch.numel(), place)) if later else []
    return any(
        list(_fitting(_flat(total.output), streams, b, seen.limit))
        for total in later
        for b in (branch, *turned_rows(branch, total.output))
    )


def _added_again(seen: Traced, later: list[Value], x: Tensor, b: Tensor) -> tuple[int, tuple[float, float]] | None:
    """Return the last of the next sums that is still made of the two alone, and their factors there."""
    fits = [(v.when, fit) for v in later[:_AGAIN] if (fit := _fit(_flat(v.output), x, b, seen.limit)) is not None]
    return fits[-1] if fits else None


def turned_rows(branch: Tensor, total: Tensor) -> list[Tensor]:
    """Return what a map gave with samples and positions in the other order, as attention with time first has it."""
    if total.ndim != 3:
        return []
    one, other, width = total.shape
    return [branch.reshape(other, one, width).transpose(0, 1).reshape(-1)]


def _streams(seen: Traced, when: int, size: int, place: str) -> Iterator[tuple[Tensor, int]]:
    """Yield what the stream may be, and since when it is there.

    What a map inside the branch's own module gave is none: an adapter adds to the map that it stands beside.

    Values before, and what modules are given, which no operation need have made. A stream times a number may be a value
    of its own: that it is taken once shows by the stream itself.
    """
    maps: set[int] = seen.once("maps", lambda: {product.when for product in seen.products})
    for value in reversed(seen.values[max(0, when - _BACK) : when]):
        is_beside = place and value.when in maps and value.place.startswith(f"{place}.")
        if value.output.numel() == size and not is_beside:
            yield _flat(value.output), value.when
    for call in seen.calls:
        if call.since <= when and call.given.numel() == size:
            yield _flat(call.given), call.since


def _multiple(seen: Traced, x: Tensor, since: int, when: int) -> float:
    """Return by what a stream was multiplied beforehand: 1, unless the branch is made of another multiple of it."""
    taken = [c.given for c in seen.calls if since < c.since <= when]
    taken += [p.left for p in seen.products if since < p.when <= when]
    for given in taken:
        if given.numel() == x.numel():
            own = _flat(given)
            factor = float((x @ own) / (own @ own).clamp(min=1e-300))
            if float((x - factor * own).abs().amax()) <= seen.limit * float(x.abs().amax()):
                return factor
    return 1.0


def _fitting(
    y: Tensor, streams: list[tuple[Tensor, int]], b: Tensor, limit: float
) -> Iterator[tuple[Tensor, int, tuple[float, float]]]:
    """Yield the streams of which a sum is made together with a branch, since when each is there, and both factors.

    Squares of the rests of all of them at once, wide enough for what they lose by cancelling, leave a few to look at.
    """
    if not streams:
        return
    stacked = torch.stack([x for x, _ in streams])
    squares, along = stacked.square().sum(1), stacked @ b
    size = (b @ b).clamp(min=1e-300)
    own = squares - along.square() / size
    of_y = stacked @ y - along * (b @ y) / size
    rest = y @ y - (b @ y).square() / size - of_y.square() / own.clamp(min=1e-300)
    is_near = rest <= len(y) * (limit * y.abs().amax()).square() + 1e-6 * (y @ y)
    for number in (is_near | (own <= 1e-8 * squares)).nonzero().flatten().tolist():
        x, since = streams[number]
        if (fit := _fit(y, x, b, limit)) is not None:
            yield x, since, fit


def _fit(y: Tensor, x: Tensor, b: Tensor, limit: float) -> tuple[float, float] | None:
    """Return the factors of `y = f x + g b` where that holds up to rounding, and the part of b is seen in it."""
    own = x - (x @ b) / (b @ b).clamp(min=1e-300) * b
    size = own @ own
    if float(size) <= 1e-12 * float(x @ x):
        return None
    stream = (own @ y) / size
    branch = ((y - stream * x) @ b) / (b @ b).clamp(min=1e-300)
    left, part = float((y - stream * x - branch * b).abs().amax()), float((branch * b).abs().amax())
    explains = left <= limit * float(y.abs().amax()) and left <= _SEEN * part
    return (float(stream), float(branch)) if explains and min(abs(float(stream)), abs(float(branch))) > limit else None


def _flat(x: Tensor) -> Tensor:
    return x.cpu().double().reshape(-1)


def _is_row_shift(one: Tensor, other: Tensor, width: int, limit: float) -> bool:
    """Whether two values differ by one row that all tokens share: a bias was added."""
    apart = (one - other).reshape(-1, width)
    return bool((apart - apart[:1]).abs().amax() <= limit * one.abs().amax())

"""How what a sublayer gives is added to the stream, told by its numbers: `stream = a x + b sublayer(...)`."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from veriformer.properties.anatomy.traced import Traced, Value

_NEXT = 40  # values between a map's output and the sum that takes it: dropouts, norms, casts, a bias, another sublayer
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


def residual_sums(seen: Traced, width: int, limit: float) -> list[Sum]:
    """Return the sums of a stream of some width, in order.

    Args:
        seen: the trace of a forward.
        width: D.
        limit: largest relative difference that is rounding.
    """
    found = []
    for product in seen.products:
        output = product.output
        if output.shape[-1] != width or product.right.shape[:-2].numel() > 1:
            continue
        if one := _sum_of(seen.values, product.when, product.place, limit):
            found.append(one)
    return found


def _sum_of(values: list[Value], when: int, place: str, limit: float) -> Sum | None:
    """Return the first sum that takes a map's output, with the stream that it is nearest to be added to as it is.

    Of the values before, several may be the stream but for a factor (what a norm multiplies it by on its way).
    """
    branch = _flat(values[when].output)
    later = [v for v in values[when + 1 : when + _NEXT] if v.output.numel() == branch.numel()]
    for total in (v for v in later if v.name == "add"):
        y = _flat(total.output)
        before = [_flat(v.output) for v in later if v.when < total.when and v.name == "add"]
        shifted = [x for x in before if _is_row_shift(x, branch, total.output.shape[-1], limit)]  # a bias was added
        streams = [_flat(v.output) for v in values[max(0, when - _BACK) : when] if v.output.numel() == y.numel()]
        found: list[Sum] = []
        for b in (branch, *turned_rows(branch, total.output), *shifted):
            for x in reversed(streams):
                if (factors := _factors(y, x, b, limit)) is not None:
                    found.append(Sum(place, *factors, when, total.when))
                    if _off(found[-1]) < limit:
                        return found[-1]
        if found:
            return min(found, key=_off)
    return None


def _off(one: Sum) -> float:
    return abs(one.stream - 1) + abs(one.branch - 1)


def _factors(y: Tensor, x: Tensor, b: Tensor, limit: float) -> tuple[float, float] | None:
    """Return `(a, c)` with `y = a x + c b`, neither of them 0; None where there are none."""
    square = (b @ b).clamp(min=1e-300)
    own = x - (x @ b) / square * b
    size = own @ own
    if float(size) <= 1e-12 * float(x @ x):
        return None
    a = (own @ y) / size
    c = ((y - a * x) @ b) / square
    explains = float((y - a * x - c * b).abs().amax()) <= limit * float(y.abs().amax())
    return (float(a), float(c)) if explains and min(abs(float(a)), abs(float(c))) > limit else None


def turned_rows(branch: Tensor, total: Tensor) -> list[Tensor]:
    """Return what a map gave with samples and positions in the other order, as attention with time first has it."""
    if total.ndim != 3:
        return []
    one, other, width = total.shape
    return [branch.reshape(other, one, width).transpose(0, 1).reshape(-1)]


def _flat(x: Tensor) -> Tensor:
    return x.double().reshape(-1)


def _is_row_shift(one: Tensor, other: Tensor, width: int, limit: float) -> bool:
    """Whether two values differ by one row that all tokens share: a bias was added."""
    apart = (one - other).reshape(-1, width)
    return bool((apart - apart[:1]).abs().amax() <= limit * one.abs().amax())
